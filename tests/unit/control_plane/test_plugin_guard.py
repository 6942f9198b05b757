"""Torch and triton stay out of the control plane's processes, and out of nobody else's."""

import sys

import pytest

from control_plane.plugin_guard import without_tensors
from plugins.classes import BlockedImport


@pytest.mark.parametrize("name", ["triton", "triton.language", "torch"])
def test_a_blocked_package_cannot_be_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in [each for each in sys.modules if each.partition(".")[0] == name.partition(".")[0]]:
        monkeypatch.delitem(sys.modules, each)

    with without_tensors(), pytest.raises(BlockedImport, match="is blocked in the control plane, which has no tensors"):
        __import__(name)


def test_others_can_be_imported_and_afterwards_nothing_is_left() -> None:
    before = list(sys.meta_path)

    with without_tensors():
        __import__("tomllib")

    assert sys.meta_path == before
