"""Says what the figures were measured on, and who used the processor meanwhile. Reads Linux's /proc.

A run beside other work says little: the share of processor time that neither server nor client took tells which
runs those are.
"""

import asyncio
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("dihedral", "torch", "transformers", "grpcio", "tokenizers", "numpy")
_PROC = Path("/proc")
_MIB = 1024 * 1024
_RSS_PERIOD_S = 0.5


def machine_facts(proc: Path = _PROC) -> Mapping[str, object]:
    """Processor, cores, memory, system and versions, as the results file shows them."""
    cpu = _fields(proc / "cpuinfo")
    return {
        "processor": cpu.get("model name", platform.machine()),
        "cores": os.cpu_count(),
        "flags": [flag for flag in cpu.get("flags", "").split() if flag.startswith(("avx512", "amx", "avx2"))],
        "memory_gib": round(int(_fields(proc / "meminfo")["MemTotal"].split()[0]) / 1024 / 1024, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
    }


class Processes:
    """A process and its descendants: their processor time and memory."""

    def __init__(self, pid: int, proc: Path = _PROC) -> None:
        self._pid = pid
        self._proc = proc

    def cpu_s(self) -> float:
        """Processor seconds taken so far by those that are alive."""
        ticks = sum(int(stat[11]) + int(stat[12]) for stat in map(self._stat, self._pids()) if stat)
        return ticks / os.sysconf("SC_CLK_TCK")

    def rss_mib(self) -> int:
        """Resident memory now; pages that they share count for each."""
        pages = sum(int(stat[21]) for stat in map(self._stat, self._pids()) if stat)
        return pages * os.sysconf("SC_PAGE_SIZE") // _MIB

    def _pids(self) -> Sequence[int]:
        children: dict[int, list[int]] = {}
        for entry in self._proc.iterdir():
            if entry.name.isdigit() and (stat := self._stat(int(entry.name))):
                children.setdefault(int(stat[1]), []).append(int(entry.name))
        found = [self._pid]
        for pid in found:  # grows while it is read
            found.extend(children.get(pid, ()))
        return found

    def _stat(self, pid: int) -> Sequence[str]:
        """The fields of /proc/PID/stat from `state` on, which is number 3 there; empty if the process is gone."""
        try:
            return (self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return ()


def machine_cpu_s(proc: Path = _PROC) -> float:
    """Processor seconds that the whole machine has spent on work, time stolen by its host included."""
    user, nice, system, _, _, irq, softirq, steal = map(int, (proc / "stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one run took of the machine."""

    client_cpu_s: float
    server_cpu_s: float | None = None  # None: the server runs elsewhere
    peak_rss_mib: int | None = None  # of the server's processes together
    foreign_cpu_percent: float | None = None  # of the machine's processor time, taken by neither server nor client


class Watch:
    """Sees what a server's processes and the machine take while the context lasts; pid None: only the client."""

    def __init__(self, pid: int | None) -> None:
        self._processes = None if pid is None else Processes(pid)
        self._peak_rss_mib = 0

    async def __aenter__(self) -> "Watch":
        self._before = self._clocks()
        self._sampling = asyncio.create_task(self._sample_memory())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._after = self._clocks()
        self._sampling.cancel()
        with suppress(asyncio.CancelledError):
            await self._sampling

    def usage(self) -> Usage:
        """Return what was taken; the context must have ended."""
        wall_s, machine_s, client_s, server_s = (
            after - before for after, before in zip(self._after, self._before, strict=True)
        )
        if self._processes is None:
            return Usage(client_cpu_s=round(client_s, 2))
        foreign_s = max(0.0, machine_s - client_s - server_s)
        return Usage(
            client_cpu_s=round(client_s, 2),
            server_cpu_s=round(server_s, 2),
            peak_rss_mib=self._peak_rss_mib,
            foreign_cpu_percent=round(100 * foreign_s / (wall_s * (os.cpu_count() or 1)), 1),
        )

    def _clocks(self) -> tuple[float, float, float, float]:
        server_s = self._processes.cpu_s() if self._processes else 0.0
        return time.perf_counter(), machine_cpu_s(), time.process_time(), server_s

    async def _sample_memory(self) -> None:
        while self._processes is not None:
            self._peak_rss_mib = max(self._peak_rss_mib, self._processes.rss_mib())
            await asyncio.sleep(_RSS_PERIOD_S)


def _fields(path: Path) -> Mapping[str, str]:
    pairs = (line.partition(":") for line in path.read_text().splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
