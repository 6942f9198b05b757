"""Tells what importing some modules does besides defining things: `python import_probe.py ROOT MODULE...` prints JSON.

Imports them twice: the first time brings in other people's packages, whose doings are not ours to judge; the
second time is watched, with everything but our modules in place.
"""

import importlib
import json
import logging
import os
import signal
import sys
import threading
from typing import Any

WATCHED = (
    "socket.",
    "subprocess.",
    "os.putenv",
    "os.unsetenv",
    "os.chdir",
    "os.fork",
    "os.mkdir",
    "os.remove",
    "shutil.",
)


def state() -> dict[str, object]:
    """Return what an import must leave as it was."""
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in list(logging.root.manager.loggerDict))]
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "native threads": len(os.listdir("/proc/self/task")),
        "working folder": os.getcwd(),
        "import path": list(sys.path),
        "import hooks": len(sys.meta_path),
        "signal handlers": [
            str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        ],
        "log handlers": [str(handler) for log in loggers for handler in log.handlers],
        "log level": logging.getLogger().level,
        "torch threads": sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None,
    }


def import_again(names: list[str]) -> None:
    for name in names:
        del sys.modules[name]
    for name in names:
        importlib.import_module(name)


def main() -> None:
    sys.dont_write_bytecode = True
    sys.path.insert(0, sys.argv[1])
    names = sys.argv[2:]
    root_handlers = list(logging.getLogger().handlers)
    for name in names:
        importlib.import_module(name)
    found: list[str] = []
    if logging.getLogger().handlers != root_handlers:
        found.append("log handlers: the root logger has new ones")
    before, is_watching = state(), True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if not is_watching:
            return
        if event.startswith(WATCHED):
            found.append(f"{event}: {arguments[:2]}")
        elif event == "open" and not str(arguments[0]).endswith((".py", ".pyc")):
            found.append(f"open: {arguments[0]}")

    sys.addaudithook(watch)
    import_again(names)
    is_watching = False
    after = state()
    found += [f"{name}: {before[name]} became {after[name]}" for name in before if before[name] != after[name]]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
