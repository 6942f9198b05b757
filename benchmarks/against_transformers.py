"""Races Dihedral against `transformers` on the same weights, the same prompts and the same number of threads.

    python -m benchmarks.against_transformers [--rounds 5] [--threads 1] [--model PATH]

One round is `generate` of transformers on one stream, Dihedral on one stream, Dihedral on eight; the two take turns,
so that whatever else the machine does meets both. Medians count. Weights and activations are bfloat16, decoding is
greedy, and every answer has 128 tokens to a prompt of 128. Exits with 1 if a ratio is under its floor.
"""

import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import grpc
import torch
from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.load import Answer, Client, closed_loop
from benchmarks.machine import machine_facts
from benchmarks.prompts import WordList
from benchmarks.server import running_server
from gpu_worker.config import WorkerConfig
from gpu_worker.loading.open import open_model
from plugins.errors import ServingError
from protos.channel import channel_options

RESULTS = Path(__file__).parent / "results"
START_LIMIT_S = 300.0
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS, NUM_STREAMS = 128, 128, 8
MIN_ONE_STREAM, MIN_EIGHT_STREAMS = 1.0, 4.0  # Dihedral's rate over that of transformers on one stream

app = App(name="python -m benchmarks.against_transformers", help="Race Dihedral against transformers.")


@dataclass(frozen=True, slots=True)
class Round:
    """Output tokens per second of one round."""

    transformers_1: float
    dihedral_1: float
    dihedral_8: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Medians over the rounds, and their ratios to transformers on one stream."""

    transformers_1: float
    dihedral_1: float
    dihedral_8: float
    one_stream: float
    eight_streams: float

    @property
    def holds(self) -> bool:
        return self.one_stream >= MIN_ONE_STREAM and self.eight_streams >= MIN_EIGHT_STREAMS


@app.default
def race(
    *serve_arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    rounds: int = 5,
    threads: int | None = None,
    model: str | None = None,
    name: str = "against_transformers",
) -> int:
    """Race Dihedral against transformers.

    Parameters
    ----------
    serve_arguments: further arguments of the server, after `--`
    rounds: how many times each runs
    threads: computing threads of each; as many as Dihedral would take if left out
    model: a folder or .gguf file; the embedded model if left out
    name: of the file in benchmarks/results
    """
    console = Console()
    config = WorkerConfig(model=model, threads=threads)
    threads = threads or max(1, len(os.sched_getaffinity(0)) - 1)
    RESULTS.mkdir(exist_ok=True)
    try:
        measured = asyncio.run(_race(console, config, threads, rounds, serve_arguments, RESULTS / f"{name}.log"))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except ServingError as error:
        console.print(f"{error}", style="red", markup=False)
        return 1
    verdict = judge(measured)
    results = {
        "machine": machine_facts(),
        "threads": threads,
        "rounds": [asdict(each) for each in measured],
        "median": asdict(verdict),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    console.print(_table(measured, verdict))
    return 0 if verdict.holds else 1


def judge(rounds: Sequence[Round]) -> Verdict:
    """Reduce the rounds to medians and ratios."""
    transformers_1 = statistics.median(each.transformers_1 for each in rounds)
    dihedral_1 = statistics.median(each.dihedral_1 for each in rounds)
    dihedral_8 = statistics.median(each.dihedral_8 for each in rounds)
    return Verdict(
        transformers_1,
        dihedral_1,
        dihedral_8,
        one_stream=round(dihedral_1 / transformers_1, 3),
        eight_streams=round(dihedral_8 / transformers_1, 3),
    )


def load_reference(config: WorkerConfig) -> Any:
    """Load the model that Dihedral serves into transformers, in bfloat16: a LlamaForCausalLM."""
    loader, _ = open_model(config)
    numbers = loader.config()
    model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers has no types here
        LlamaConfig(
            vocab_size=numbers.vocab_size,
            hidden_size=numbers.hidden_size,
            intermediate_size=numbers.intermediate_size,
            num_hidden_layers=numbers.num_hidden_layers,
            num_attention_heads=numbers.num_attention_heads,
            num_key_value_heads=numbers.num_key_value_heads,
            head_dim=numbers.head_dim,
            rms_norm_eps=numbers.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": numbers.rope_theta},
            max_position_embeddings=numbers.max_position_embeddings,
            tie_word_embeddings=numbers.tie_word_embeddings,
        ),
        dtype=torch.bfloat16,
    )
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in loader.weights():
            own[name].copy_(tensor)
    return model.eval()


class _Racers:
    """Both competitors, ready to run. Each method returns output tokens per second."""

    def __init__(self, reference: Any, client: Client, words: WordList) -> None:
        self._reference = reference
        self._client = client
        self._words = words

    async def round(self, seed: int) -> Round:
        prompts = self._words.prompts(0, NUM_PROMPT_TOKENS, seed)
        token_ids = [list(await self._client.tokenize(prompts[index])) for index in range(1 + NUM_STREAMS)]
        return Round(
            transformers_1=self._transformers(token_ids[0]),
            dihedral_1=await self._dihedral(token_ids[:1]),
            dihedral_8=await self._dihedral(token_ids[1:]),
        )

    def _transformers(self, token_ids: Sequence[int]) -> float:
        prompt = torch.tensor([token_ids])
        start_s = time.perf_counter()
        with torch.inference_mode():
            output = self._reference.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=NUM_OUTPUT_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
            )
        wall_s = time.perf_counter() - start_s
        return float((output.shape[1] - prompt.shape[1]) / wall_s)

    async def _dihedral(self, prompts: Sequence[Sequence[int]]) -> float:
        async def send(index: int) -> Answer:
            return await self._client.generate(prompts[index], NUM_OUTPUT_TOKENS)

        start_s = time.perf_counter()
        answers = await closed_loop(send, len(prompts), len(prompts), lambda: None)
        wall_s = time.perf_counter() - start_s
        for answer in answers:
            if answer.error is not None or answer.num_output_tokens != NUM_OUTPUT_TOKENS:
                raise ServingError(f"a request gave {answer.num_output_tokens} tokens: {answer.error}")
        return len(prompts) * NUM_OUTPUT_TOKENS / wall_s


async def _race(
    console: Console, config: WorkerConfig, threads: int, rounds: int, serve_arguments: Sequence[str], log: Path
) -> list[Round]:
    model_arguments = () if config.model is None else (config.model,)
    arguments = (*model_arguments, f"--worker.threads={threads}", "--worker.dtype=bfloat16", *serve_arguments)
    with Progress(console=console) as progress:
        task = progress.add_task("loading", total=rounds + 1)
        torch.set_num_threads(threads)
        reference = load_reference(config)
        async with (
            running_server(arguments, log, START_LIMIT_S, time.perf_counter) as server,
            grpc.aio.insecure_channel(server.address, options=channel_options()) as channel,
        ):
            client = Client(channel, time.perf_counter)
            racers = _Racers(reference, client, await WordList.measure(client.tokenize))
            measured = []
            for seed in range(rounds + 1):
                progress.update(task, description=f"round {seed}" if seed else "warm-up")
                measured.append(await racers.round(seed))
                progress.advance(task)
    return measured[1:]


def _table(rounds: Sequence[Round], verdict: Verdict) -> Table:
    table = Table("", "transformers, 1 stream", "Dihedral, 1 stream", "Dihedral, 8 streams", title="output tok/s")
    for number, each in enumerate(rounds, 1):
        table.add_row(str(number), *(f"{rate:.1f}" for rate in asdict(each).values()))
    table.add_section()
    table.add_row("median", f"{verdict.transformers_1:.1f}", f"{verdict.dihedral_1:.1f}", f"{verdict.dihedral_8:.1f}")
    table.add_row(
        "ratio",
        "1",
        f"{verdict.one_stream:.2f} (floor {MIN_ONE_STREAM:g})",
        f"{verdict.eight_streams:.2f} (floor {MIN_EIGHT_STREAMS:g})",
    )
    return table


if __name__ == "__main__":
    sys.exit(app())
