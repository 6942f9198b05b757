"""Importing a module of ours defines things and does nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGES, ROOT, modules


def effects_of_importing(root: Path, *names: str) -> list[str]:
    command = [sys.executable, str(ROOT / "tests/architecture/import_probe.py"), str(root), *names]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    effects: list[str] = json.loads(run.stdout)
    return effects


def test_importing_our_modules_has_no_effect() -> None:
    names = [name for name in modules(*PACKAGES) if not name.endswith(("_pb2", "_pb2_grpc"))]

    assert effects_of_importing(ROOT, *names) == []


@pytest.mark.parametrize(
    ("source", "effect"),
    [
        ("import os\nos.environ['PLANTED'] = '1'", "os.putenv"),
        ("open('/dev/null').close()", "open: /dev/null"),
        ("import socket\nsocket.socket().close()", "socket."),
        ("import subprocess\nsubprocess.run(['true'])", "subprocess."),
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "threads"),
        ("import logging\nlogging.basicConfig()", "log handlers"),
        ("import logging\nlogging.getLogger('x').addHandler(logging.NullHandler())", "log handlers"),
        ("import signal\nsignal.signal(signal.SIGTERM, lambda *_: None)", "signal handlers"),
        ("import sys\nsys.path.append('/planted')", "import path"),
    ],
)
def test_every_planted_effect_is_found(tmp_path: Path, source: str, effect: str) -> None:
    (tmp_path / "planted.py").write_text(source + "\n")

    effects = effects_of_importing(tmp_path, "planted")

    assert any(found.startswith(effect) for found in effects), effects
