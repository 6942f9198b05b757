"""The values that the two planes exchange: requests, step plans, step results, what a worker is.

Holds meaning, units and invariants; how these values look on the wire is the business of `protos/codec.py`.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NewType

RequestId = NewType("RequestId", str)  # the caller's name for a request; unique among those in flight
WorkerId = NewType("WorkerId", str)  # a worker's address, or "local" in process
BlockId = NewType("BlockId", int)  # index of a KV block, in [0, num_blocks)
TokenId = NewType("TokenId", int)  # index into the vocabulary, in [0, vocab_size)
GenerationId = NewType("GenerationId", str)  # names workers that may stand in for one another
Row = NewType("Row", int)  # a sequence's fixed place in a worker's tables, in [0, max_sequences)


class FinishReason(enum.IntEnum):
    """Why a request ended. The numbers are wire values; 0 is 'not finished' there and no member here."""

    STOP = 1  # an end-of-sequence or stop token, which is the last token of the output
    LENGTH = 2  # max_tokens were produced
    CANCELLED = 3  # the caller asked for it, or went away
    DEADLINE = 4  # the deadline passed
    FAILED = 5  # an error ended it; the error says which


class LogprobsMode(enum.IntEnum):
    """Of which scores log-probabilities are told. The numbers are wire values."""

    RAW = 1  # the model's own, before anything changed them
    PROCESSED = 2  # those that the token was drawn from: after every stage, temperature and truncation


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """What the text must look like. Exactly one field is set."""

    json_schema: str | None = None  # a JSON schema as text
    json_object: bool = False  # any JSON object
    regex: str | None = None  # in Rust's syntax; the whole text matches
    choice: tuple[str, ...] = ()  # one of these texts
    grammar: str | None = None  # Lark, as llguidance reads it


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request, and what to tell of them. Ranges are checked at admission, not here."""

    n: int = 1  # outputs of the same prompt
    max_tokens: int | None = None  # output tokens, >= 1; None: until the context is full
    min_tokens: int = 0  # no stop token and no stop string ends the output before it has so many
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the likeliest tokens that together hold this mass, in (0, 1]
    min_p: float = 0.0  # drop tokens less likely than this share of the likeliest one, in [0, 1]
    presence_penalty: float = 0.0  # taken off the score of each token that the output has, in [-2, 2]
    frequency_penalty: float = 0.0  # likewise, times how often the output has it, in [-2, 2]
    repetition_penalty: float = 1.0  # divides the positive score of each token in prompt or output, > 0
    seed: int | None = None  # in [0, 2**64); None: admission draws one that stays with the request
    stop: tuple[str, ...] = ()  # any of these texts ends the output
    stop_token_ids: tuple[TokenId, ...] = ()  # any of these ends the output, besides the model's own
    include_stop_str_in_output: bool = False  # the text keeps what ended it
    ignore_eos: bool = False  # the model's end-of-sequence tokens do not end the output
    bad_words: tuple[str, ...] = ()  # texts that the output will not have
    logit_bias: Mapping[TokenId, float] = field(default_factory=dict)  # added to scores, in [-100, 100]
    allowed_token_ids: tuple[TokenId, ...] = ()  # no others are chosen; empty: all are allowed
    structured_output: StructuredOutput | None = None
    logprobs: int | None = None  # tell the log-probability of each token and of so many likeliest ones; None: of none
    prompt_logprobs: int | None = None  # likewise for the prompt
    logprob_token_ids: tuple[TokenId, ...] = ()  # tell of these tokens instead of the likeliest ones
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    skip_special_tokens: bool = True  # special tokens have no text
    detokenize: bool = True  # tell the text
    stream_interval: int = 1  # tokens per message, but for the last one
    extra_args: Mapping[str, Any] = field(default_factory=dict)  # of logits processors: JSON values by name
    bad_word_ids: tuple[tuple[TokenId, ...], ...] = ()  # bad_words as tokens; admission fills it in
    grammar: str = ""  # structured_output as llguidance reads it; admission fills it in


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asked for. Valid by construction: admission made it. Never changes; shared freely.

    The engine numbers requests as they arrive. A request whose worker was lost is given to another scheduler as a
    new Request with the same number and the output it had.
    """

    request_id: RequestId
    prompt_token_ids: tuple[TokenId, ...]  # not empty
    sampling: SamplingParams  # max_tokens and seed are set
    tenant: str = ""  # on whose account it runs; "" is everybody who gave no name
    priority: int = 0  # lower goes first
    cache_salt: str = ""  # only requests with the same salt share cached blocks
    sibling_of: RequestId | None = None  # another sample of that request's prompt; they share its blocks
    arrival: int = 0  # the engine's number of this request: grows by one with each
    arrival_s: float = 0.0  # when it came, on the engine's clock
    output_token_ids: tuple[TokenId, ...] = ()  # what it had when its worker was lost; < max_tokens of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A sequence enters a worker: new, or back after a preemption with the tokens it had."""

    row: Row
    request_id: RequestId
    token_ids: tuple[TokenId, ...]  # prompt, then the output so far
    num_prompt_tokens: int  # the first ones of token_ids
    sampling: SamplingParams
    block_ids: tuple[BlockId, ...]  # hold the keys and values of the cached tokens; chunks bring the rest
    num_cached_tokens: int  # leading tokens that need no computing; < len(token_ids)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one sequence that one step computes.

    A chunk that reaches the end of what the worker knows of the sequence samples one token, and the
    worker appends it to the row. So a chunk carries a count and no token.
    """

    row: Row
    num_tokens: int  # >= 1; prompt tokens first, then one per decode step
    new_blocks: tuple[BlockId, ...] = ()  # appended to the sequence's block table before the step runs


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one block's keys and values to another before the step runs."""

    source: BlockId
    destination: BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step must do. A worker carries plans out strictly in order: release, copy, admit, forward.

    A plan may name a row whose sequence the worker has already finished, because it was made before the
    result that says so arrived: the worker skips that row and reports it with no token.
    """

    seq: int  # 1 for the first plan of an epoch, then one more each
    released_rows: tuple[Row, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()
    admitted: tuple[Admission, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    decode_steps: int = 1  # k > 1: every chunk is a decode of one token, repeated k times; blocks are in the plan

    @property
    def is_empty(self) -> bool:
        """True if a worker would have nothing to do, not even to forget a row."""
        return not (self.released_rows or self.block_copies or self.admitted or self.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.num_tokens for chunk in self.chunks) * self.decode_steps


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What is known of one place of a sequence: the token that is there, then others, the likeliest first.

    The columns have one entry per token. With `logprob_token_ids` the others are those, in their order.
    """

    token_ids: tuple[TokenId, ...]  # at least the token itself, which comes first and may come again among the others
    logprobs: tuple[float, ...]  # natural logarithms; -inf for what cannot be
    ranks: tuple[int, ...]  # 1 is the likeliest of the vocabulary


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Part of what is told of one row's prompt: the places [start, start + len(places)). Place 0 is never told."""

    row: Row
    start: int  # >= 1
    places: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class RowFailure:
    """One row could not be computed; its neighbours could. The worker has forgotten the row's progress."""

    row: Row
    reason: str  # UPPER_SNAKE, stable, for machines
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step produced: one entry per row that sampled, ended or was skipped, in ragged columns.

    Entries come in the order of the plan's chunks. `token_ids` is flat: row `rows[i]` produced the next `counts[i]` of
    them. `finishes[i]` is the worker's verdict about that row, None while it goes on.

    A row that has not ended, with a count of 0, waited: its next token could not be chosen yet, say because its
    grammar is still being read. All its known tokens but the last are computed then: the next plan that names the row
    computes that one again, and chooses. A plan in flight that counted on the missing token does the same.
    """

    seq: int  # of the plan
    rows: tuple[Row, ...] = ()
    counts: tuple[int, ...] = ()  # same length as rows
    token_ids: tuple[TokenId, ...] = ()  # sum(counts) of them
    finishes: tuple[FinishReason | None, ...] = ()  # same length as rows; STOP, LENGTH or None
    failures: tuple[RowFailure, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # one per token, None where not asked for; empty: nobody asked
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    queue_ns: int = 0  # from the plan's arrival to the start of its computing
    compute_ns: int = 0  # from there to the result


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended; the scheduler has let go of everything it held."""

    request_id: RequestId
    reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """The sizes of a worker's buffers for one request. Admission refuses what does not fit."""

    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024  # tokens
    max_allowed_token_ids: int = 1024
    max_bad_words: int = 128  # as tokens: a word counts once for each way to write it
    max_bad_word_tokens: int = 1024  # of all words together
    max_logprobs: int = 20  # tokens told besides the one that is there
    max_logprob_token_ids: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorInfo:
    """A logits processor as it is plugged in."""

    name: str  # what its configuration and its errors call it
    place: str  # pkg.mod:Class
    distribution: str  # name and version, or empty
    extra_arg_names: tuple[str, ...] | None = None  # what it reads of extra_args, sorted; None: maybe anything
    parameter_schema: str = ""  # JSON schema of those, as text; empty: it declares none


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What admission must know of a model."""

    name: str  # what requests call it
    architecture: str  # as the checkpoint names it, such as LlamaForCausalLM
    dtype: str  # of weights and activations: bfloat16, float32
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together
    eos_token_ids: tuple[TokenId, ...]
    num_parameters: int
    default_sampling: SamplingParams = SamplingParams()  # what a request gets that does not say otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker is and how much it can hold. Fixed while its process lives."""

    model: ModelInfo
    incarnation: str  # drawn at process start: another value is another process
    num_blocks: int
    block_size: int  # tokens per block
    max_sequences: int  # rows
    max_step_tokens: int  # tokens in one plan
    kv_cache_dtype: str
    kv_bytes: int  # of all blocks together
    tokenizer_sha256: str  # of TokenizerBundle.tokenizer_json
    load_s: float  # how long the model took to load
    weights_version: str = ""  # equal for equal weights; another value is another generation
    plugins: tuple[str, ...] = ()  # what was added to it, each as name==version, sorted
    sampling_limits: SamplingLimits = SamplingLimits()
    logits_processors: tuple[str, ...] = ()  # their places, pkg.mod:Class, in the order in which they are applied
    has_grammars: bool = False  # it can hold an output to a grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerBundle:
    """All that the control plane needs to turn text into tokens and back; made by the worker's loader."""

    tokenizer_json: bytes  # the format of the `tokenizers` library
    chat_template: str  # Jinja; empty if the model has none
    bos_token: str  # "" if the model has none; templates may name it
    eos_token: str
    add_bos: bool  # plain text prompts start with bos_token
