"""What is read from /proc, against a folder that looks like it."""

import os
from pathlib import Path

import pytest

from benchmarks.machine import Processes, machine_cpu_s, machine_facts

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def add_process(proc: Path, pid: int, parent: int, cpu_s: int, rss_mib: int) -> None:
    fields = ["0"] * 40
    fields[0], fields[1] = "S", str(parent)
    fields[11], fields[12] = str(cpu_s * TICKS), str(TICKS)  # user time, and one second of system time
    fields[21] = str(rss_mib * 1024 * 1024 // PAGE)
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} (a name) with) 9 9) {' '.join(fields)}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    add_process(tmp_path, 10, parent=1, cpu_s=3, rss_mib=100)
    add_process(tmp_path, 11, parent=10, cpu_s=5, rss_mib=200)
    add_process(tmp_path, 12, parent=11, cpu_s=7, rss_mib=400)
    add_process(tmp_path, 20, parent=1, cpu_s=50, rss_mib=1000)
    (tmp_path / "stat").write_text(f"cpu  {TICKS} {2 * TICKS} {4 * TICKS} 99 99 0 0 {8 * TICKS} 0 0\ncpu0 1 2 3\n")
    (tmp_path / "cpuinfo").write_text("model name\t: Abacus 9000\nflags\t\t: fpu avx2 sse avx512f\n\n")
    (tmp_path / "meminfo").write_text("MemTotal:       25165824 kB\nMemFree:        1 kB\n")
    return tmp_path


def test_a_process_is_counted_with_its_descendants(proc: Path) -> None:
    processes = Processes(10, proc)

    assert processes.cpu_s() == 18.0
    assert processes.rss_mib() == 700


def test_a_process_that_is_gone_takes_nothing(proc: Path) -> None:
    processes = Processes(4711, proc)

    assert (processes.cpu_s(), processes.rss_mib()) == (0.0, 0)


def test_the_machine_is_busy_with_work_and_not_with_waiting(proc: Path) -> None:
    assert machine_cpu_s(proc) == 15.0


def test_the_facts_name_processor_memory_and_versions(proc: Path) -> None:
    facts = machine_facts(proc)

    assert facts["processor"] == "Abacus 9000"
    assert facts["flags"] == ["avx2", "avx512f"]
    assert facts["memory_gib"] == 24.0
    assert isinstance(facts["versions"], dict)
    assert set(facts["versions"]) == {"dihedral", "torch", "transformers", "grpcio", "tokenizers", "numpy"}
