"""Rebuilds the stubs beside the .proto files: `python -m protos.generate [DIRECTORY]`.

Generation is a step of development; the stubs are committed, and a test compares them with what this makes.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> None:
    """Write every `_pb2.py`, `_pb2.pyi`, `_pb2_grpc.py` and `_pb2_grpc.pyi` under `out`, as they lie under the root.

    Raises: CalledProcessError: protoc refused a file; its own message is on stderr.
    """
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").glob("*/v1/*.proto"))
    # protoc finds its plug-ins on PATH, and make calls the interpreter without activating its environment
    scripts = sysconfig.get_path("scripts")
    environment = {**os.environ, "PATH": scripts + os.pathsep + os.environ.get("PATH", "")}
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *sources]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
