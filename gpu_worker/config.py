"""The configuration of one worker."""

from dataclasses import dataclass
from math import isfinite

from plugins.errors import InvalidConfig

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    model: str | None = None  # a folder, a .gguf file or a hub id; None: the embedded model
    served_model_name: str | None = None  # what requests call it; None: the last part of `model`
    load_format: str = "auto"  # auto, gguf, safetensors, dummy, or a plug-in's name
    dtype: str = "bfloat16"  # of weights and activations: bfloat16 or float32
    threads: int | None = None  # computing threads; None: the cores this process may use - 1, at least 1
    max_model_len: int | None = None  # tokens of prompt and output together; None: what the model was trained for
    max_sequences: int = 64  # rows: sequences that may be on the worker at once
    max_step_tokens: int = 512  # tokens in one step, prompt and decode together
    block_size: int = 16  # tokens per KV block
    kv_cache_gib: float = 1.0  # memory for the KV cache; less is taken if max_sequences x max_model_len need less
    num_blocks: int | None = None  # KV blocks; None: as kv_cache_gib holds, or fewer if all rows cannot fill so many
    kv_cache_dtype: str = "auto"  # auto: as dtype
    seed: int = 0  # of random weights, for load_format dummy
    grammar_threads: int = 1  # in which grammars say what may come next, beside the computing threads
    check_processors: bool = False  # hold logits processors to the rows that they accepted; costs time
    host: str = "127.0.0.1"  # where the worker listens
    port: int = 50061  # 0: any free port
    lease_s: float = 5.0  # how long the owner keeps the worker after its stream ends

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_step_tokens", "block_size", "grammar_threads"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"worker.{name} must be at least 1, is {getattr(self, name)}")
        for name in ("threads", "max_model_len", "num_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidConfig(f"worker.{name} must be at least 1 or left out, is {value}")
        if self.max_step_tokens < self.max_sequences:
            raise InvalidConfig(
                f"worker.max_step_tokens ({self.max_step_tokens}) must be at least worker.max_sequences "
                f"({self.max_sequences}), so that every sequence can decode"
            )
        if self.dtype not in DTYPES:
            raise InvalidConfig(f"worker.dtype must be {' or '.join(DTYPES)}, is {self.dtype!r}")
        if not (isfinite(self.kv_cache_gib) and self.kv_cache_gib > 0):
            raise InvalidConfig(f"worker.kv_cache_gib must be a number above 0, is {self.kv_cache_gib}")
        if not 0 <= self.port <= 65535:
            raise InvalidConfig(f"worker.port must be in [0, 65535], is {self.port}")
        if self.lease_s < 0:
            raise InvalidConfig(f"worker.lease_s must be at least 0, is {self.lease_s}")
