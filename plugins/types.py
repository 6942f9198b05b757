"""The values that the two planes exchange: requests, step plans, step results, what a worker is.

Holds meaning, units and invariants; how these values look on the wire is the business of `protos/codec.py`.
"""

import enum
from dataclasses import dataclass
from typing import NewType

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request. Ranges are checked at admission, not here."""

    max_tokens: int | None = None  # output tokens, >= 1; None: until the context is full
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the likeliest tokens that together hold this mass, in (0, 1]
    min_p: float = 0.0  # drop tokens less likely than this share of the likeliest one, in [0, 1]
    seed: int | None = None  # in [0, 2**64); None: admission draws one that stays with the request
    stop_token_ids: tuple[TokenId, ...] = ()  # any of these ends the output, besides the model's own
    ignore_eos: bool = False  # the model's end-of-sequence tokens do not end the output


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
    """

    seq: int  # of the plan
    rows: tuple[Row, ...] = ()
    counts: tuple[int, ...] = ()  # same length as rows
    token_ids: tuple[TokenId, ...] = ()  # sum(counts) of them
    finishes: tuple[FinishReason | None, ...] = ()  # same length as rows; STOP, LENGTH or None
    failures: tuple[RowFailure, ...] = ()
    queue_ns: int = 0  # from the plan's arrival to the start of its computing
    compute_ns: int = 0  # from there to the result


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended; the scheduler has let go of everything it held."""

    request_id: RequestId
    reason: FinishReason


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerBundle:
    """All that the control plane needs to turn text into tokens and back; made by the worker's loader."""

    tokenizer_json: bytes  # the format of the `tokenizers` library
    chat_template: str  # Jinja; empty if the model has none
    bos_token: str  # "" if the model has none; templates may name it
    eos_token: str
    add_bos: bool  # plain text prompts start with bos_token
