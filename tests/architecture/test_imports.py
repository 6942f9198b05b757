"""Who may import whom: the contracts in pyproject.toml hold, and what they cannot say holds too."""

import ast
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGES, ROOT, files, is_stub

# Folders of plugins/ whose functions may import these: they run where there is a device, or on behalf of one.
TENSORS_IN_FUNCTIONS = {"builtin": {"torch", "numpy"}, "conformance": {"torch", "numpy"}}

# Where the names of a device's own libraries may stand. Everyone else speaks to the device through these files.
DEVICE_FILES: frozenset[str] = frozenset()


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sysconfig.get_path("scripts")) / "lint-imports"
    command = [str(program), "--no-logo", "--no-cache", "pyproject.toml"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def copy_of_the_sources(target: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", target)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def imported_modules(source: str, of_functions: bool = True) -> set[str]:
    """Return the modules that a source imports anywhere but under `if TYPE_CHECKING`.

    `of_functions=False` leaves out what is imported when a function runs.
    """
    tree = ast.parse(source)
    skipped = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for child in ast.walk(statement)
    }
    if not of_functions:
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        skipped |= {id(child) for function in functions for child in ast.walk(function)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def names_a_device_library(source: str) -> bool:
    """Tell whether a source says `torch.cuda` or imports triton."""
    tree = ast.parse(source)
    attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = {name.split(".")[0] for name in imported_modules(source)}
    from_torch = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "torch"
        for alias in node.names
    }
    return "torch.cuda" in attributes | imported_modules(source) or "triton" in imported or "cuda" in from_torch


def test_every_import_contract_is_kept() -> None:
    lint = lint_imports(ROOT)

    assert lint.returncode == 0, lint.stdout


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("control_plane/planted.py", "import torch", "the control plane has no tensors BROKEN"),
        (
            "control_plane/planted.py",
            "import gpu_worker.config",
            "planes never meet; protos and plugins lie below them BROKEN",
        ),
        (
            "gpu_worker/planted.py",
            "import control_plane",
            "planes never meet; protos and plugins lie below them BROKEN",
        ),
        ("plugins/planted.py", "import protos.generate", "planes never meet; protos and plugins lie below them BROKEN"),
        ("plugins/planted.py", "def late():\n    import numpy", "plugins need the standard library only BROKEN"),
        ("control_plane/kv/planted.py", "import time", "scheduling, KV accounting and the engine core are pure BROKEN"),
        ("control_plane/text/planted.py", "import control_plane.api", "the control plane has layers BROKEN"),
        ("gpu_worker/kv/planted.py", "import gpu_worker.ops", "the worker has layers BROKEN"),
        (
            "control_plane/api/planted.py",
            "from control_plane.scheduling.run_ahead import RunAheadScheduler",
            "composition roots choose the classes BROKEN",
        ),
        (
            "gpu_worker/planted.py",
            "from protos.worker.v1 import worker_pb2",
            "generated stubs are imported at the edges BROKEN",
        ),
    ],
)
def test_a_planted_import_breaks_its_contract(tmp_path: Path, module: str, line: str, broken: str) -> None:
    root = copy_of_the_sources(tmp_path)
    (root / module).write_text(line + "\n")

    lint = lint_imports(root)

    assert lint.returncode == 1
    assert broken in lint.stdout


@pytest.mark.parametrize(
    "path", [path for path in files() if path.parts[0] == "plugins" and path.suffix == ".py"], ids=str
)
def test_the_vocabulary_imports_the_standard_library_only(path: Path) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    at_import = {name.split(".")[0] for name in imported_modules(source, of_functions=False)}
    later = {name.split(".")[0] for name in imported_modules(source)} - TENSORS_IN_FUNCTIONS.get(path.parts[1], set())

    assert (at_import | later) - sys.stdlib_module_names - {"plugins"} == set()


def test_an_import_inside_a_function_is_found_and_one_for_types_is_not() -> None:
    source = "if TYPE_CHECKING:\n    from torch import Tensor\n\ndef f():\n    import numpy.linalg\n"

    assert imported_modules(source) == {"numpy.linalg"}
    assert imported_modules(source, of_functions=False) == set()


@pytest.mark.parametrize(
    "path",
    [path for path in files() if path.suffix == ".py" and path.parts[0] in PACKAGES and not is_stub(path)],
    ids=str,
)
def test_a_device_library_is_named_in_the_device_files_alone(path: Path) -> None:
    allowed = path.as_posix() in DEVICE_FILES

    assert allowed or not names_a_device_library((ROOT / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.cuda.synchronize()\n",
        "from torch import cuda\n",
        "import torch.cuda\n",
        "def f():\n    import triton.language as tl\n",
    ],
)
def test_every_way_to_name_a_device_library_is_found(source: str) -> None:
    assert names_a_device_library(source)
