"""Every file is short, near the top, named for an idea, and says what it is for."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGES, ROOT, files, is_stub

MAX_LINES = 500
MAX_FOLDERS = 3  # the top one, and two below it
EMPTY_NAMES = {"util", "utils", "helper", "helpers", "common", "base", "misc"}
PYTHON = [path for path in files() if path.suffix == ".py" and not is_stub(path)]


def num_lines(path: Path) -> int:
    """Count the lines of a text file; a binary one has none."""
    try:
        return len(path.read_text(encoding="utf-8").splitlines())
    except UnicodeDecodeError:
        return 0


def too_long(root: Path) -> list[str]:
    return [
        f"{path}: {n} lines" for path in files(root) if not is_stub(path) and (n := num_lines(root / path)) > MAX_LINES
    ]


def too_deep(paths: Iterator[Path]) -> list[Path]:
    """Find files that lie too deep. Unit tests mirror the packages, so they count from the package that they mirror."""
    return [path for path in paths if len(path.parent.parts) - path.match("tests/unit/*/*/*") > MAX_FOLDERS]


def named_for_nothing(paths: Iterator[Path]) -> list[Path]:
    """Find folders and files of such names; `protos/common` is exempt, as a wire package that all others import."""
    return [
        path
        for path in paths
        if path.parts[:2] != ("protos", "common") and EMPTY_NAMES.intersection([*path.parent.parts, path.stem])
    ]


def has_docstring(source: str) -> bool:
    """Tell whether a module opens with a docstring; an empty one needs none."""
    module = ast.parse(source)
    return not module.body or bool(ast.get_docstring(module))


def asserts(source: str) -> list[int]:
    return [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]


def test_no_file_has_more_than_500_lines() -> None:
    assert too_long(ROOT) == []


def test_a_file_of_501_lines_is_found_and_a_generated_stub_is_not(tmp_path: Path) -> None:
    (tmp_path / "kernel.c").write_text("\n" * 501)
    (tmp_path / "fits.yaml").write_text("\n" * 500)
    (tmp_path / "worker_pb2.py").write_text("\n" * 501)

    assert too_long(tmp_path) == ["kernel.c: 501 lines"]


def test_no_file_lies_more_than_two_folders_deep() -> None:
    assert too_deep(files()) == []


def test_a_file_three_folders_deep_is_found() -> None:
    fine = [Path("protos/worker/v1/worker.proto"), Path("tests/unit/gpu_worker/loading/test_hub.py")]
    deep = [Path("gpu_worker/kv/pages/int8/layout.py"), Path("tests/unit/gpu_worker/loading/gguf/test_file.py")]

    assert too_deep(iter(fine + deep)) == deep


def test_no_module_is_named_for_nothing() -> None:
    assert named_for_nothing(files()) == []


def test_a_module_named_utils_is_found_and_the_common_wire_package_is_not() -> None:
    paths = [Path("control_plane/utils.py"), Path("gpu_worker/base/kv.py"), Path("protos/common/v1/common.proto")]

    assert named_for_nothing(iter(paths)) == [Path("control_plane/utils.py"), Path("gpu_worker/base/kv.py")]


@pytest.mark.parametrize("path", PYTHON, ids=str)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert has_docstring((ROOT / path).read_text(encoding="utf-8"))


def test_a_module_without_a_docstring_is_found() -> None:
    assert not has_docstring("import enum\n")
    assert has_docstring("")


@pytest.mark.parametrize("path", [path for path in PYTHON if path.parts[0] in PACKAGES], ids=str)
def test_no_check_of_the_program_is_an_assert(path: Path) -> None:
    assert asserts((ROOT / path).read_text(encoding="utf-8")) == []


def test_an_assert_is_found_inside_a_function() -> None:
    assert asserts("def take(n):\n    assert n > 0\n    return n\n") == [2]
