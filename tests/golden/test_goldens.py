"""In reference mode the worker says what transformers says, however the requests are batched, cut or interrupted."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from control_plane.admission.config import AdmissionConfig
from control_plane.engine.core import EngineCore
from control_plane.engine.router import RoundRobin
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.run_ahead import RunAheadScheduler
from gpu_worker.config import WorkerConfig
from gpu_worker.device.memory import DeviceMemory
from gpu_worker.factory import BuiltRunner, LoadedModel, build_runner, load_model
from gpu_worker.loading.open import open_model
from plugins.types import GenerationId, Request, RequestId, SamplingParams, StepResult, TokenId, WorkerId
from tests.fakes import worker_info

WORKER, GENERATION = WorkerId("local"), GenerationId("local")
GOLDENS = json.loads((Path(__file__).parent / "smollm2.json").read_text())["goldens"]
REFERENCE = WorkerConfig(dtype="float32", max_model_len=128, num_blocks=64, max_sequences=8, max_step_tokens=512)


@dataclass(frozen=True)
class Run:
    """What one drive of the engine produced."""

    outputs: list[list[int]]  # one per golden, in their order
    num_steps: int
    num_preemptions: int
    num_free_blocks: int  # after the last request


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    """The embedded model in float32: 0.6 GB, read once."""
    torch.set_num_threads(1)
    loader, _ = open_model(REFERENCE)
    yield load_model(REFERENCE, loader, torch.device("cpu"), lambda phase, done, total: None)


def runner_of(loaded: LoadedModel, config: WorkerConfig) -> BuiltRunner:
    return build_runner(config, replace(loaded, memory=DeviceMemory(torch.device("cpu"))))


def drive(loaded: LoadedModel, config: WorkerConfig, goldens: Sequence[dict[str, list[int]]]) -> Run:
    """Serve the goldens' prompts together with the engine and the scheduler of the service.

    Every plan that may be in flight is launched before the first result is read, which is the harder order.
    """
    built = runner_of(loaded, config)
    info = worker_info(config.num_blocks or 0, config.block_size, config.max_sequences, config.max_step_tokens)
    info = replace(info, model=replace(info.model, vocab_size=loaded.config.vocab_size))
    schedulers: list[RunAheadScheduler] = []

    def make_scheduler(_: object) -> RunAheadScheduler:
        schedulers.append(RunAheadScheduler(SchedulerConfig(), info))
        return schedulers[0]

    core = EngineCore(make_scheduler, AdmissionConfig(max_waiting=len(goldens)), RoundRobin())
    core.connect(WORKER)
    core.attach(WORKER, info, GENERATION, now_s=0.0)
    outputs: list[list[int]] = [[] for _ in goldens]
    for index, golden in enumerate(goldens):
        prompt = tuple(TokenId(token_id) for token_id in golden["prompt"])
        sampling = SamplingParams(temperature=0.0, max_tokens=len(golden["output"]), seed=0, ignore_eos=True)
        request = Request(request_id=RequestId(str(index)), prompt_token_ids=prompt, sampling=sampling)
        core.submit(request, GENERATION, now_s=0.0)
    results: list[StepResult] = []
    num_steps = 0
    while core.has_work():
        step = core.step([(WORKER, result) for result in results], now_s=0.0)
        assert step.lost == ()
        launched = [built.runner.launch(plan) for _, plan in step.plans]
        results = [pending.result() for pending in launched]
        num_steps += len(step.plans)
        for delivery in step.deliveries:
            outputs[int(delivery.request_id)].extend(delivery.token_ids)
    load = schedulers[0].load()
    return Run(outputs, num_steps, load.num_preemptions, load.num_free_blocks)


def test_each_prompt_alone_gets_the_tokens_of_transformers(loaded: LoadedModel) -> None:
    runs = [drive(loaded, REFERENCE, [golden]) for golden in GOLDENS]

    assert [run.outputs[0] for run in runs] == [golden["output"] for golden in GOLDENS]


def test_eight_prompts_together_get_the_tokens_of_transformers(loaded: LoadedModel) -> None:
    run = drive(loaded, REFERENCE, GOLDENS)

    assert run.outputs == [golden["output"] for golden in GOLDENS]
    assert run.num_steps < 40


def test_seven_tokens_a_step_and_four_rows_change_no_token(loaded: LoadedModel) -> None:
    run = drive(loaded, replace(REFERENCE, max_step_tokens=7, max_sequences=4), GOLDENS)

    assert run.outputs == [golden["output"] for golden in GOLDENS]


def test_preemption_in_a_small_pool_changes_no_token_and_loses_no_block(loaded: LoadedModel) -> None:
    run = drive(loaded, replace(REFERENCE, num_blocks=12, block_size=16), GOLDENS)

    assert run.outputs == [golden["output"] for golden in GOLDENS]
    assert run.num_preemptions > 0
    assert run.num_free_blocks == 12
