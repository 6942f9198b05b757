"""Measures what share of a decode step choosing the tokens takes, with and without each thing that a request may ask.

    python -m benchmarks.sampler [--only "greedy; penalties"] [--batches 1,8,32] [--steps 30]

The embedded model decodes in this process, without a control plane. Every row of a batch asks for the same. What is
timed is `SamplingPipeline`: bringing the stages' state to the device, and everything between the model's scores and the
tokens; the rest of the step is the model. Rows have the history of a prompt, and keys and values that are zero: no
prompt is computed, and no time depends on what they hold. The model is timed once for each batch size; then it repeats
what it answered, but for grammars, whose work goes on beside it.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cyclopts import App
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.machine import machine_facts
from benchmarks.results_file import write_results
from gpu_worker.config import WorkerConfig
from gpu_worker.factory import build_runner, load_model
from gpu_worker.kv.cache import KVCache
from gpu_worker.loading.open import open_model
from gpu_worker.models.registry import Model
from gpu_worker.runner.inputs import StepInputs
from gpu_worker.runner.model_runner import ModelRunner
from gpu_worker.sampling.pipeline import SamplingPipeline
from plugins.errors import InvalidConfig
from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig, RequestStates
from plugins.logits_loading import load_processors
from plugins.types import (
    Admission,
    BlockId,
    Chunk,
    LogprobsMode,
    RequestId,
    Row,
    SamplingParams,
    StepPlan,
    TokenId,
)

RESULTS = Path(__file__).parent / "results"
BLOCK_SIZE = 16
NUM_WARM_UP = 3  # steps
NUM_COMPUTED = 5  # steps of each batch size whose model is timed
MAX_WAITS = 500  # steps until every row has a token: a grammar is read meanwhile
VOCAB_SIZE = 49_152
_TIMED = ("apply_staged_writes", "begin", "sample")

app = App(name="python -m benchmarks.sampler", help="Measure the sampler's share of a step.")


class Boost(LogitsProcessor):
    """A custom processor that does as little as one can: it adds to one token."""

    extra_arg_names = ("boost",)

    def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None:
        self._amounts = torch.zeros(config.max_num_reqs)
        self._staged: dict[Row, float] = {}

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        self._staged[req_idx] = float(sampling_params.extra_args.get("boost", 0.0))
        return "boost" in sampling_params.extra_args

    def apply_staged_writes(self) -> None:
        for row, amount in self._staged.items():
            self._amounts[row] = amount
        self._staged.clear()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        logits[:, 0] += self._amounts[ctx.expanded_idx_mapping]
        return logits


def features() -> Mapping[str, Mapping[str, Any]]:
    """Return what every row asks for, by name. All but the first draw at temperature 0.8."""
    rng = np.random.default_rng(1)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(int(token) for token in rng.choice(VOCAB_SIZE, count, replace=False))

    asked: dict[str, Mapping[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "temperature": {},
        "min_p": {"min_p": 0.05},
        "top-k, top-p": {"top_k": 40, "top_p": 0.95},
        "top-p": {"top_p": 0.95},
        "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.2},
        "logit bias, 100": {"logit_bias": dict.fromkeys(tokens(100), 1.5)},
        "allowed ids, 100": {"allowed_token_ids": tokens(100)},
        "bad words, 20": {"bad_word_ids": tuple(tokens(1 + index % 3) for index in range(20))},
        "min_tokens": {"min_tokens": 1000, "stop_token_ids": tokens(3)},
        "logprobs, 5": {"logprobs": 5},
        "logprobs, 5 processed": {"logprobs": 5, "logprobs_mode": LogprobsMode.PROCESSED},
        "logprobs of 20 named": {"logprobs": 0, "logprob_token_ids": tokens(20)},
        "custom processor": {"extra_args": {"boost": 0.5}},
    }
    if find_spec("llguidance") is not None:
        from llguidance import LLMatcher

        asked["grammar"] = {"grammar": LLMatcher.grammar_from_regex("[a-z ]{4000}"), "ignore_eos": False}
    return asked


@dataclass(frozen=True, slots=True)
class Run:
    """Medians over the steps of one feature at one batch size."""

    feature: str
    batch: int
    sampler_ms: float
    step_ms: float
    share: float  # of the step


@app.default
def measure_all(
    *,
    only: str = "",
    batches: str = "1,8,32",
    steps: int = 30,
    prompt_tokens: int = 128,
    threads: int = 1,
    dtype: str = "bfloat16",
    name: str = "sampler",
) -> int:
    """Measure the sampler's share of a step.

    Parameters
    ----------
    only: which features, by semicolon, as the table names them; all if left out
    batches: rows that decode at once, by comma
    steps: measured steps of each
    prompt_tokens: of each row
    threads: computing threads
    dtype: of weights and activations
    name: of the file in benchmarks/results
    """
    console = Console()
    torch.set_num_threads(threads)
    try:
        asked = choose(only, features())
        sizes = [int(size) for size in batches.split(",")]
    except (InvalidConfig, ValueError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    row_blocks = -(-(prompt_tokens + NUM_WARM_UP + steps + 8) // BLOCK_SIZE)
    runner, model = build(dtype, max(sizes), row_blocks)
    blank(runner, max(sizes), row_blocks)
    runs = []
    with Progress(console=console) as progress:
        task = progress.add_task("", total=len(sizes) * len(asked))
        for size in sizes:
            progress.update(task, description=f"model, {size}")
            model_ms = measure_model(runner, model, size, prompt_tokens, row_blocks)
            for feature, sampling in asked.items():
                progress.update(task, description=f"{feature}, {size}")
                model.is_computed = "grammar" in sampling
                sampler, rest = measure(runner, model, sampling, size, steps, prompt_tokens, row_blocks)
                step = sampler + rest + model_ms
                runs.append(Run(feature, size, round(sampler, 3), round(step, 3), round(sampler / step, 4)))
                progress.advance(task)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    write_results(path, {"machine": machine_facts(), "threads": threads, "runs": [asdict(run) for run in runs]})
    console.print(_table(runs, sizes))
    console.print(f"written to {path}", highlight=False)
    return 0


def choose(names: str, known: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    """Split a list by semicolon. Raises: InvalidConfig: a name is not among the known ones."""
    chosen = [name.strip() for name in names.split(";") if name.strip()] or list(known)
    for each in chosen:
        if each not in known:
            raise InvalidConfig(f"there is no {each!r}; there are {'; '.join(known)}")
    return {name: known[name] for name in chosen}


class RepeatedModel:
    """A model that is computed, or repeats what it answered to as many tokens. Adds up the time that it takes."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._hidden: dict[int, torch.Tensor] = {}  # by the number of tokens
        self._scores: dict[int, torch.Tensor] = {}  # by the number of rows
        self.is_computed = True
        self.elapsed_s = 0.0

    def forward(self, inputs: StepInputs, cache: KVCache) -> torch.Tensor:
        return self._answer(self._hidden, len(inputs.token_ids), lambda: self._model.forward(inputs, cache))

    def head(self, x_RE: torch.Tensor) -> torch.Tensor:
        return self._answer(self._scores, len(x_RE), lambda: self._model.head(x_RE)).clone()

    def _answer(self, kept: dict[int, torch.Tensor], size: int, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        start_s = time.perf_counter()
        if self.is_computed or size not in kept:
            kept[size] = compute()
        self.elapsed_s += time.perf_counter() - start_s
        return kept[size]


def build(dtype: str, max_sequences: int, row_blocks: int) -> tuple[ModelRunner, RepeatedModel]:
    """Load the embedded model, with blocks for all rows and the custom processor."""
    config = WorkerConfig(
        dtype=dtype,
        block_size=BLOCK_SIZE,
        num_blocks=max_sequences * row_blocks,
        max_sequences=max_sequences,
        max_model_len=row_blocks * BLOCK_SIZE,
    )
    loader, _ = open_model(config)
    loaded = load_model(config, loader, torch.device("cpu"), lambda phase, done, total: None)
    model = RepeatedModel(loaded.model)
    loaded = replace(loaded, model=model)
    built = build_runner(config, loaded, processors=load_processors((Boost,)), bundle=loader.tokenizer())
    return built.runner, model


def measure_model(
    runner: ModelRunner, model: RepeatedModel, num_rows: int, prompt_tokens: int, row_blocks: int
) -> float:
    """Compute a few steps of so many rows; return what the model takes of one, in milliseconds."""
    model.is_computed = True
    runner.reset()
    _start(runner, {"temperature": 0.0}, num_rows, prompt_tokens, row_blocks)
    model_ms = []
    for _ in range(NUM_COMPUTED):
        model.elapsed_s = 0.0
        runner.launch(_decode(num_rows)).result()
        model_ms.append(model.elapsed_s * 1e3)
    return statistics.median(model_ms)


def measure(
    runner: ModelRunner,
    model: RepeatedModel,
    sampling: Mapping[str, Any],
    num_rows: int,
    num_steps: int,
    prompt_tokens: int,
    row_blocks: int,
) -> tuple[float, float]:
    """Let so many rows decode; return what a step takes in the sampler and outside of it and the model, in ms."""
    runner.reset()
    _start(runner, sampling, num_rows, prompt_tokens, row_blocks)
    for _ in range(NUM_WARM_UP):
        runner.launch(_decode(num_rows)).result()
    sampler_ms, rest_ms = [], []
    with Stopwatch() as watch:
        for _ in range(num_steps):
            watch.elapsed_s = model.elapsed_s = 0.0
            start_s = time.perf_counter()
            result = runner.launch(_decode(num_rows)).result()
            elapsed_s = time.perf_counter() - start_s
            sampler_ms.append(watch.elapsed_s * 1e3)
            rest_ms.append((elapsed_s - watch.elapsed_s - model.elapsed_s) * 1e3)
            if len(result.token_ids) != num_rows:
                raise RuntimeError(f"{len(result.token_ids)} tokens of {num_rows} rows")
    return statistics.median(sampler_ms), statistics.median(rest_ms)


def _decode(num_rows: int) -> StepPlan:
    return StepPlan(seq=1, chunks=tuple(Chunk(Row(row), 1) for row in range(num_rows)))


def blank(runner: ModelRunner, num_rows: int, row_blocks: int) -> None:
    """Fill every row's blocks with zeros, which a worker does with blocks that are new."""
    blocks = [
        tuple(BlockId(block) for block in range(row * row_blocks, (row + 1) * row_blocks)) for row in range(num_rows)
    ]
    admitted = tuple(_admission(row, {}, 1, (), num_cached_tokens=0) for row in range(num_rows))
    chunks = tuple(Chunk(Row(row), 1, blocks[row]) for row in range(num_rows))
    runner.launch(StepPlan(seq=1, admitted=admitted, chunks=chunks)).result()


def _start(
    runner: ModelRunner, sampling: Mapping[str, Any], num_rows: int, prompt_tokens: int, row_blocks: int
) -> None:
    """Admit the rows behind their prompts, and step those that wait until each has its first token."""
    waiting: Sequence[int] = range(num_rows)
    admitted = tuple(
        _admission(
            row,
            sampling,
            prompt_tokens,
            range(row * row_blocks, (row + 1) * row_blocks),
            num_cached_tokens=prompt_tokens - 1,
        )
        for row in waiting
    )
    for _ in range(MAX_WAITS):
        chunks = tuple(Chunk(Row(row), 1) for row in waiting)
        result = runner.launch(StepPlan(seq=1, admitted=admitted, chunks=chunks)).result()
        waiting = [row for row, count in zip(result.rows, result.counts, strict=True) if count == 0]
        if not waiting:
            return
        admitted = ()
    raise RuntimeError(f"rows {waiting} still wait after {MAX_WAITS} steps")


def _admission(
    row: int, sampling: Mapping[str, Any], prompt_tokens: int, blocks: Sequence[int], num_cached_tokens: int
) -> Admission:
    prompt = np.random.default_rng(row).integers(100, VOCAB_SIZE, prompt_tokens)
    return Admission(
        row=Row(row),
        request_id=RequestId(str(row)),
        token_ids=tuple(TokenId(int(token)) for token in prompt),
        num_prompt_tokens=prompt_tokens,
        sampling=SamplingParams(**{"temperature": 0.8, "seed": row, "ignore_eos": True} | dict(sampling)),
        block_ids=tuple(BlockId(block) for block in blocks),
        num_cached_tokens=num_cached_tokens,
    )


class Stopwatch:
    """Adds up the time that goes by in the pipeline of sampling, while it is entered."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self._originals = {name: getattr(SamplingPipeline, name) for name in _TIMED}

    def __enter__(self) -> "Stopwatch":
        for name, original in self._originals.items():
            setattr(SamplingPipeline, name, self._timed(original))
        return self

    def __exit__(self, *error: object) -> None:
        for name, original in self._originals.items():
            setattr(SamplingPipeline, name, original)

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start_s = time.perf_counter()
            answer = original(*arguments)
            self.elapsed_s += time.perf_counter() - start_s
            return answer

        return call


def _table(runs: Sequence[Run], sizes: Sequence[int]) -> Table:
    table = Table("", *(f"{size} rows" for size in sizes), title="sampler: ms, and share of the step", box=None)
    for feature in dict.fromkeys(run.feature for run in runs):
        by_size = {run.batch: run for run in runs if run.feature == feature}
        cells = (f"{by_size[size].sampler_ms:.2f}  {by_size[size].share:.1%}" for size in sizes)
        table.add_row(feature, *cells)
    return table


if __name__ == "__main__":
    sys.exit(app())
