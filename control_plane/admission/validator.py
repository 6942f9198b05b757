"""Checks every field of a request and turns it into one that the engine can carry out.

Knows what a request may ask for; how many may wait, and for how long, is the engine's business.
"""

import uuid
from collections.abc import Callable
from dataclasses import replace

from control_plane.admission.account import account_violations
from control_plane.admission.config import AdmissionConfig
from control_plane.admission.prompt import PromptReader
from control_plane.admission.sampling import ExtraArgChecker, Grammars, SamplingReader
from control_plane.admission.submission import Admitted, Submission
from control_plane.engine.served import ServedModel, ServedModels
from plugins.errors import FieldViolation, InvalidRequest
from plugins.noise import child_seed
from plugins.sampling_ranges import told
from plugins.types import Request, RequestId, SamplingParams, TokenId, WorkerInfo

SIBLING_MARK = "·"  # in the names of further outputs; callers' names are ASCII
MAX_NAME_CHARACTERS = 128  # of a request_id or a model's name: they come back in headers and logs


def draw_request_id() -> str:
    """Make an id that no caller would."""
    return uuid.uuid4().hex


class Validator:
    """Admits requests. Stateless: may be called from any thread, and the same submission gets the same answer."""

    def __init__(
        self,
        models: ServedModels,
        config: AdmissionConfig,
        draw_seed: Callable[[], int],
        draw_request_id: Callable[[], str] = draw_request_id,
        *,
        extra_args: ExtraArgChecker | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Without `extra_args` no argument of a processor is known; without `grammars` none can be asked for."""
        self._models = models
        self._reader = PromptReader(config.max_prompt_bytes)
        self._sampling = SamplingReader(config.max_outputs, extra_args, grammars)
        self._config = config
        self._tenant_key = config.tenant_key
        self._draw_seed = draw_seed  # in [0, 2**64)
        self._draw_request_id = draw_request_id

    def validate(self, submission: Submission) -> Admitted:
        """Return the requests, with max_tokens and seed resolved, and the model that they are for.

        Takes about half a second per MiB of text, which it tokenizes, and as long as a grammar takes to compile.
        Raises: InvalidRequest: names every field that is wrong; UnknownModel; NotServing; PluginFailed.
        """
        model = self.find_model(submission.model)
        sampling, found = self._sampling.read(submission.sampling, model)
        violations: list[FieldViolation] = [
            *_request_id_violations(submission.request_id),
            *found,
            *account_violations(submission, self._tenant_key),
        ]
        prompt: tuple[TokenId, ...] = ()
        try:
            prompt = self._reader.read(submission, model)
        except InvalidRequest as error:
            violations += error.violations
        room = _room(model.worker) - len(prompt)
        if prompt:
            violations += self._room_violations(sampling, len(prompt), room)
        if violations:
            raise InvalidRequest(violations)
        request = Request(
            request_id=RequestId(submission.request_id or self._draw_request_id()),
            prompt_token_ids=prompt,
            sampling=self._resolved(sampling, room),
            tenant=submission.tenant,
            priority=submission.priority,
            cache_salt=submission.cache_salt,
        )
        limit_s, asked_s = self._config.max_queue_s, submission.max_queue_time_s
        return Admitted(
            requests=_outputs(request),
            model=model,
            max_queue_s=limit_s if asked_s is None else min(limit_s, asked_s),
            echo=submission.echo,
        )

    def tokenize(self, submission: Submission) -> tuple[TokenId, ...]:
        """Return the tokens of a submission's text or conversation, of any number. Raises: as `validate`."""
        return self._reader.encode(submission, self.find_model(submission.model))

    def find_model(self, name: str) -> ServedModel:
        """Look a model up; "" is the only one.

        Raises: InvalidRequest: no model could have this name; UnknownModel; NotServing.
        """
        if len(name) > MAX_NAME_CHARACTERS:
            raise InvalidRequest([_too_long("model", name)])
        return self._models.get(name)

    def _resolved(self, sampling: SamplingParams, room: int) -> SamplingParams:
        """Fill in what was left open. Who asks for more than there is room for gets what there is."""
        max_tokens, seed = sampling.max_tokens, sampling.seed
        if max_tokens is not None and max_tokens <= room and seed is not None:
            return sampling
        return replace(
            sampling,
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            seed=self._draw_seed() if seed is None else seed,
        )

    def _room_violations(self, sampling: SamplingParams, num_prompt_tokens: int, room: int) -> list[FieldViolation]:
        """Tell what cannot be had with a prompt of this length, which leaves so much room."""
        violations = []
        min_tokens, max_tokens = sampling.min_tokens, sampling.max_tokens
        if min_tokens > room and (max_tokens is None or min_tokens <= max_tokens):  # else it was told already
            description = f"is {told(min_tokens)}; a prompt of {num_prompt_tokens} tokens leaves room for {room}"
            violations.append(FieldViolation("sampling.min_tokens", "OUT_OF_RANGE", description))
        num_told, most = sampling.prompt_logprobs, self._config.max_prompt_logprobs
        if num_told is not None and num_prompt_tokens * (num_told + 1) > most:
            description = (
                f"is {num_told} for a prompt of {num_prompt_tokens} tokens; {num_prompt_tokens} x {num_told + 1} is "
                f"more than the {most} that are allowed (admission.max_prompt_logprobs)"
            )
            violations.append(FieldViolation("sampling.prompt_logprobs", "TOO_MANY", description))
        return violations


def _outputs(request: Request) -> tuple[Request, ...]:
    """Make n requests for one output each. The first has the caller's name, which no caller can give the others."""
    sampling = request.sampling
    if sampling.n == 1 or sampling.seed is None:
        return (request,)
    requests = []
    for index in range(sampling.n):
        num_told = sampling.prompt_logprobs if index == 0 else None  # one output is enough
        own = replace(sampling, seed=child_seed(sampling.seed, index), prompt_logprobs=num_told)
        if index == 0:
            requests.append(replace(request, sampling=own))
            continue
        name = RequestId(f"{request.request_id}{SIBLING_MARK}{index}")
        requests.append(replace(request, request_id=name, sampling=own, sibling_of=request.request_id))
    return tuple(requests)


def _request_id_violations(request_id: object) -> list[FieldViolation]:
    if not isinstance(request_id, str):
        return [FieldViolation("request_id", "WRONG_TYPE", f"is {told(request_id)}; must be a text")]
    if len(request_id) > MAX_NAME_CHARACTERS:
        return [_too_long("request_id", request_id)]
    if not (request_id.isascii() and request_id.isprintable()):
        return [FieldViolation("request_id", "NOT_PRINTABLE_ASCII", "may only contain printable ASCII characters")]
    return []


def _too_long(field: str, name: str) -> FieldViolation:
    return FieldViolation(field, "TOO_LONG", f"has {len(name)} characters; at most {MAX_NAME_CHARACTERS} are allowed")


def _room(worker: WorkerInfo) -> int:
    """The most tokens that prompt and output may have together."""
    return min(worker.model.max_model_len, worker.num_blocks * worker.block_size)
