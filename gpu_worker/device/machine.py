"""Tells how much memory the machine has left for this process.

Reads what the kernel says; what must fit into it is decided in `gpu_worker/kv/capacity.py`.
"""

from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that can be allocated without swapping, and within the limit of a container (cgroup v2).

    None: the kernel tells neither. `root` is where /proc and /sys are found.
    """
    told = (_available_to_all(root / "proc/meminfo"), _limit_of_container(root / "sys/fs/cgroup/memory.max"))
    return min((num_bytes for num_bytes in told if num_bytes is not None), default=None)


def _available_to_all(meminfo: Path) -> int | None:
    for line in (_read(meminfo) or "").splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return int(value.removesuffix("kB")) * 1024
    return None


def _limit_of_container(memory_max: Path) -> int | None:
    limit = _read(memory_max)
    return None if limit is None or limit.strip() == "max" else int(limit)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except OSError:  # another kernel, or not for us to read
        return None
