"""The wheel brings four packages and nothing else into an environment."""

import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.architecture.sources import ROOT, files, is_stub

BUILD = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """List a wheel built from a copy: building leaves folders behind, whose files the next wheel would take in."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("out")
    for path in files():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy / path)
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=copy, capture_output=True, check=True)
    return zipfile.ZipFile(next(out.glob("*.whl"))).namelist()


def test_its_top_level_is_the_four_packages(wheel: list[str]) -> None:
    top = {name.split("/")[0] for name in wheel if ".dist-info/" not in name}

    assert top == {"protos", "plugins", "control_plane", "gpu_worker"}


def test_it_carries_every_file_of_the_packages(wheel: list[str]) -> None:
    packaged = {
        path.as_posix() for path in files() if path.parts[0] in {"protos", "plugins", "control_plane", "gpu_worker"}
    }

    assert packaged - set(wheel) == set()


def test_it_carries_the_types_and_the_stubs(wheel: list[str]) -> None:
    stubs = {path.as_posix() for path in files() if is_stub(path)}

    assert "control_plane/py.typed" in wheel
    assert "protos/worker/v1/worker.proto" in wheel
    assert stubs <= set(wheel)


def test_it_carries_the_licence(wheel: list[str]) -> None:
    assert [name.rpartition("/")[2] for name in wheel if ".dist-info/licenses/" in name] == ["LICENSE"]
