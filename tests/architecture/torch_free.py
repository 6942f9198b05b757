"""Runs a Python program in which torch and its kin cannot be imported, as on a machine that has none.

`python -m tests.architecture.torch_free MODULE:FUNCTION [ARGUMENTS]` calls the function; it finds the arguments in
sys.argv.
"""

import importlib
import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

BLOCKED = frozenset({"torch", "transformers", "safetensors", "gguf", "triton"})


class Blocker(importlib.abc.MetaPathFinder):
    """Refuses the blocked packages before any other finder is asked."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{fullname} is blocked in this process", name=fullname)
        return None


def import_all(*names: str) -> None:
    """Import some modules by name."""
    for name in names or sys.argv[1:]:
        importlib.import_module(name)


if __name__ == "__main__":
    sys.meta_path.insert(0, Blocker())
    module_name, _, function_name = sys.argv[1].partition(":")
    sys.argv = [function_name, *sys.argv[2:]]
    sys.exit(getattr(importlib.import_module(module_name), function_name)())
