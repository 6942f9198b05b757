"""Which files the project consists of, for the tests that hold rules about all of them."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protos", "plugins", "control_plane", "gpu_worker")
LEFT_BY_TOOLS = {"__pycache__", "build", "dist"}


def files(root: Path = ROOT) -> Iterator[Path]:
    """Yield every file of the project, relative to `root`, without what tools leave behind."""
    for path in sorted(root.iterdir()):
        if path.name.startswith(".") and path.name != ".ci":
            continue
        if path.name in LEFT_BY_TOOLS or path.suffix == ".egg-info":
            continue
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and file.suffix != ".log" and not LEFT_BY_TOOLS.intersection(file.parts):
                yield file.relative_to(root)


def is_stub(path: Path) -> bool:
    """Tell whether protoc wrote the file."""
    return path.name.endswith(("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi"))


def modules(*packages: str, root: Path = ROOT) -> Iterator[str]:
    """Yield the import name of every module below some packages, stubs included."""
    for path in files(root):
        if path.suffix == ".py" and path.parts[0] in packages and path.name != "__main__.py":
            parts = path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts
            yield ".".join(parts)
