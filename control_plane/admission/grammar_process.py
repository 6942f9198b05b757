"""Speaks to one process that reads grammars: starts it when it is needed, and ends it.

Knows processes, pipes and time limits; what is asked is the business of `structured_output.py`, what is answered that
of `grammar_child.py`. What passes between them is JSON, a line each.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

COMMAND: Final = (sys.executable, "-P", "-m", "control_plane.admission.grammar_child")
MAX_TOKENIZERS: Final = 4  # that one process is given; a new process takes its place then
START_TIMEOUT_S: Final = 30.0  # to start and read a tokenizer: 0.3 s for 49,152 tokens
GRACE_S: Final = 2.0  # beyond a grammar's own time limit, which the process keeps by itself


class ProcessGone(Exception):
    """The process could not be started, ended without an answer, or gave none in time."""


class GrammarProcess:
    """A process, or none yet. One thread at a time may ask; any thread may close it.

    The process ends when its input does, so also when this process is killed. It has a session of its own: an
    interrupt from the terminal is not meant for it.
    """

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._tokenizers: set[str] = set()
        self._is_closed = False
        self._turn = threading.Lock()  # of who asks
        self._lock = threading.Lock()  # of starting and closing

    @property
    def pid(self) -> int | None:
        """The id of the process, if there is one."""
        return None if self._process is None else self._process.pid

    def ask(
        self,
        kind: str,
        text: str,
        tokenizer: str,
        tokenizer_json: Callable[[], str],
        eos_token_ids: Sequence[int],
        timeout_s: float,
    ) -> dict[str, str]:
        """Judge a constraint: {"grammar": ...} or {"reason": ..., "message": ...}.

        `tokenizer` names the tokenizer, which is handed over the first time.
        Raises: ProcessGone: there was no answer; the next question goes to a new process.
        """
        with self._turn:
            try:
                refusal = self._hand_over(tokenizer, tokenizer_json, eos_token_ids)
                if refusal:
                    return refusal
                question = {"kind": kind, "text": text, "tokenizer": tokenizer, "timeout_s": timeout_s}
                return self._exchange(question, timeout_s + GRACE_S)
            except (OSError, ValueError) as error:
                self._end()
                raise ProcessGone(str(error)) from error

    def close(self) -> None:
        """End the process, and start no other. Who waits for an answer gets ProcessGone. Idempotent."""
        with self._lock:
            self._is_closed = True
            process = self._process
        if process is not None:
            process.kill()  # who waits for its answer sees the end of the pipe
        with self._turn:
            self._end()

    def _hand_over(
        self, tokenizer: str, tokenizer_json: Callable[[], str], eos_token_ids: Sequence[int]
    ) -> dict[str, str]:
        """Give the process a tokenizer, unless it has it. Returns why it cannot be used, or nothing."""
        if tokenizer in self._tokenizers:
            return {}
        if len(self._tokenizers) >= MAX_TOKENIZERS:
            self._end()
        question = {
            "tokenizer": tokenizer,
            "tokenizer_json": tokenizer_json(),
            "eos_token_ids": list(eos_token_ids),
        }
        refusal = self._exchange(question, START_TIMEOUT_S)
        if not refusal:
            self._tokenizers.add(tokenizer)
        return refusal

    def _exchange(self, question: Mapping[str, Any], timeout_s: float) -> dict[str, str]:
        process = self._started()
        if process.stdin is None or process.stdout is None:
            raise ProcessGone("it has no pipes")
        deadline_s = time.monotonic() + timeout_s
        _write(process.stdin.fileno(), json.dumps(question).encode() + b"\n", deadline_s)
        answer: dict[str, str] = json.loads(_read_line(process.stdout.fileno(), deadline_s))
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_closed:
                raise OSError("it was closed")
            if self._process is None:
                # What it complains of may quote the grammar, which no log is to have.
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    bufsize=0,
                    start_new_session=True,
                )
                for pipe in (self._process.stdin, self._process.stdout):
                    if pipe is not None:
                        os.set_blocking(pipe.fileno(), False)
            return self._process

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        self._tokenizers.clear()
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def _write(fd: int, data: bytes, deadline_s: float) -> None:
    rest = memoryview(data)
    while rest:
        _wait(select.POLLOUT, fd, deadline_s)
        rest = rest[os.write(fd, rest) :]


def _read_line(fd: int, deadline_s: float) -> bytes:
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        _wait(select.POLLIN, fd, deadline_s)
        parts.append(os.read(fd, 1 << 16))
        if not parts[-1]:
            raise OSError("it ended")
    return b"".join(parts)


def _wait(event: int, fd: int, deadline_s: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
        raise OSError("it does not answer")
