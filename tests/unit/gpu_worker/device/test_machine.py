"""What the kernel says of memory, read from files made up for it."""

from pathlib import Path

import pytest

from gpu_worker.device.machine import available_bytes

MEMINFO = "MemTotal:       32000000 kB\nMemFree:          500000 kB\nMemAvailable:    2000000 kB\n"


@pytest.mark.parametrize(
    ("files", "num_bytes"),
    [
        ({"proc/meminfo": MEMINFO}, 2_048_000_000),
        ({"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": "max\n"}, 2_048_000_000),
        ({"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": "1073741824\n"}, 1_073_741_824),
        ({"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": "9000000000\n"}, 2_048_000_000),
        ({"proc/meminfo": "MemTotal:       32000000 kB\n"}, None),
        ({}, None),
    ],
)
def test_memory_is_what_the_machine_has_left_within_the_limit_of_the_container(
    files: dict[str, str], num_bytes: int | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert available_bytes(tmp_path) == num_bytes
