"""Turns what an output must look like into a grammar that workers read, or says why there is none.

Grammars are tried in processes of their own: one that takes too long, or too much memory, ends there. What is asked
of those processes is here; how one is spoken to is the business of `grammar_process.py`.
"""

import hashlib
import json
import queue
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from control_plane.admission.config import AdmissionConfig
from control_plane.admission.grammar_process import GrammarProcess, ProcessGone
from control_plane.engine.served import ServedModel
from plugins.errors import FieldViolation, InvalidRequest, NotServing
from plugins.types import StructuredOutput

FIELD: Final = "sampling.structured_output"
MAX_KEPT: Final = 256  # verdicts
MAX_MESSAGE_CHARACTERS: Final = 500
NUM_TRIES: Final = 2  # a process may end for reasons of its own


@dataclass(frozen=True, slots=True)
class _Constraint:
    """One constraint: which field gave it, and what is to be read as what."""

    field: str
    kind: str
    text: str


class GrammarCompiler:
    """Tries grammars. Owned by the composition root; `compile` may be called from any thread; closed once.

    At most `admission.grammar_processes` grammars are read at once; the others wait for their turn. A verdict is
    kept, unless it was that time ran out.
    """

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._processes = tuple(GrammarProcess() for _ in range(config.grammar_processes))
        self._idle: queue.LifoQueue[GrammarProcess] = queue.LifoQueue()  # the one used last has the tokenizer
        for process in self._processes:
            self._idle.put(process)
        self._is_closed = False
        self._verdicts: OrderedDict[bytes, str | FieldViolation] = OrderedDict()  # the one used last is the last
        self._lock = threading.Lock()  # of the verdicts

    def compile(self, output: StructuredOutput, model: ServedModel) -> str:
        """Return the grammar of a constraint, as llguidance reads it. Blocks until it has been tried.

        Raises: InvalidRequest: it is no grammar, it is too complex, or it cannot be had here. NotServing: closing.
        """
        constraint = _constraint(output)
        self._check_size(constraint)
        eos_token_ids = model.worker.model.eos_token_ids
        if not (model.worker.has_grammars and eos_token_ids):
            description = "this model's worker cannot hold outputs to a grammar; leave it out"
            raise InvalidRequest([FieldViolation(FIELD, "UNSUPPORTED", description)])
        tokenizer = f"{model.worker.tokenizer_sha256} {eos_token_ids}"
        key = hashlib.sha256(f"{tokenizer}\n{constraint.kind}\n{constraint.text}".encode()).digest()
        verdict = self._kept(key)
        if verdict is None:
            answer = self._ask(constraint, model, tokenizer)
            verdict = _verdict(constraint, answer)
            if answer.get("reason") != "TIMEOUT":
                self._keep(key, verdict)
        if isinstance(verdict, FieldViolation):
            raise InvalidRequest([verdict])
        return verdict

    def close(self) -> None:
        """End the processes. Whoever waits for one gets NotServing. Idempotent."""
        self._is_closed = True
        for process in self._processes:
            process.close()

    def _check_size(self, constraint: _Constraint) -> None:
        most = self._config.max_grammar_bytes
        num_bytes = len(constraint.text) if len(constraint.text) > most else len(constraint.text.encode())
        if num_bytes > most:
            description = f"has {num_bytes} bytes; at most {most} are allowed (admission.max_grammar_bytes)"
            raise InvalidRequest([FieldViolation(constraint.field, "TOO_LARGE", description)])

    def _ask(self, constraint: _Constraint, model: ServedModel, tokenizer: str) -> dict[str, str]:
        process = self._idle.get()
        try:
            for num_left in reversed(range(NUM_TRIES)):
                try:
                    return process.ask(
                        constraint.kind,
                        constraint.text,
                        tokenizer,
                        model.text.tokenizer_json,
                        model.worker.model.eos_token_ids,
                        self._config.grammar_timeout_s,
                    )
                except ProcessGone:
                    if self._is_closed:
                        raise NotServing("the server is stopping") from None
                    if not num_left:
                        break
        finally:
            self._idle.put(process)
        return {"reason": "UNSUPPORTED", "message": "the processes that read grammars do not answer"}

    def _kept(self, key: bytes) -> str | FieldViolation | None:
        with self._lock:
            verdict = self._verdicts.get(key)
            if verdict is not None:
                self._verdicts.move_to_end(key)
            return verdict

    def _keep(self, key: bytes, verdict: str | FieldViolation) -> None:
        with self._lock:
            self._verdicts[key] = verdict
            if len(self._verdicts) > MAX_KEPT:
                self._verdicts.popitem(last=False)


def _constraint(output: StructuredOutput) -> _Constraint:
    """Say what is to be tried. Admission has checked that there is exactly one constraint."""
    if output.json_schema is not None:
        return _Constraint(f"{FIELD}.json_schema", "json_schema", output.json_schema)
    if output.json_object:
        return _Constraint(f"{FIELD}.json_object", "json_schema", '{"type": "object"}')
    if output.regex is not None:
        return _Constraint(f"{FIELD}.regex", "regex", output.regex)
    if output.choice:
        return _Constraint(f"{FIELD}.choice", "choice", json.dumps(output.choice, ensure_ascii=False))
    return _Constraint(f"{FIELD}.grammar", "grammar", output.grammar or "")


def _verdict(constraint: _Constraint, answer: dict[str, str]) -> str | FieldViolation:
    if "grammar" in answer:
        return answer["grammar"]
    reason = "GRAMMAR_TOO_COMPLEX" if answer["reason"] == "TIMEOUT" else answer["reason"]
    message = answer["message"]
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = message[: MAX_MESSAGE_CHARACTERS - 1] + "…"
    return FieldViolation(constraint.field, reason, message)
