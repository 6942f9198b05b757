"""Keeps torch and triton out of a process of the control plane, whatever its plug-ins import.

A plug-in is told so while it is loaded: a process that needs no tensors then starts fast and stays small.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

from plugins.classes import BlockedImport

BLOCKED: Final = frozenset({"torch", "triton"})


class Guard(MetaPathFinder):
    """Refuses the blocked packages before any other finder is asked."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in BLOCKED:
            raise BlockedImport(f"{fullname} is blocked in the control plane, which has no tensors", name=fullname)
        return None


@contextmanager
def without_tensors() -> Iterator[None]:
    """Refuse to import torch and triton; modules that are imported already stay."""
    guard = Guard()
    sys.meta_path.insert(0, guard)
    try:
        yield
    finally:
        sys.meta_path.remove(guard)
