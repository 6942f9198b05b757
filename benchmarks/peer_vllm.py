"""Measures what a step of vLLM's own scheduler costs. Runs under a Python that has vLLM, and knows nothing of ours.

    python -m benchmarks.peer_vllm MODEL

reads one line of JSON for each measurement, with scenario, scheduler, gc and seed, and answers with one line. The
scheduler is the real one, built from a real configuration; a fake runner's output feeds it, which is not timed.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.scheduler_scenarios import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    SCENARIOS,
    VOCAB_SIZE,
    Cost,
    Drawn,
    Scenario,
    Step,
    draw_requests,
    in_child,
    reduce_steps,
    run_steps,
)

CLASSES = {  # by the name of our scheduler that plans as far ahead
    "synchronous": ("vllm.v1.core.sched.scheduler", "Scheduler"),
    "run_ahead": ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),
}
QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "4",
}
_now_ns = time.perf_counter_ns


def _find(module: str, name: str) -> Any:
    """Import by name: no checker of ours has vLLM to look at."""
    return getattr(importlib.import_module(module), name)


def measure(model: str, scenario: Scenario, scheduler: str, gc_mode: str, seed: int) -> Cost:
    """Measure one scenario in this process."""
    rng = random.Random(seed)
    peer, hasher = _build(model, scenario, scheduler)
    _find("vllm.utils.gc_utils", "freeze_gc_heap")()
    (gc.enable if gc_mode == "on" else gc.disable)()
    requests, add_ns = [], []
    for request, spent_ns in _requests(scenario, hasher, rng):
        start_ns = _now_ns()
        peer.add_request(request)
        add_ns.append(spent_ns + _now_ns() - start_ns)
        requests.append(request)
    steps, num_preemptions = run_steps(
        scenario,
        _stepper(peer, scheduler == "run_ahead", rng),
        lambda: sum(request.num_preemptions for request in requests),
    )
    return reduce_steps(steps, add_ns, num_preemptions)


def _build(model: str, scenario: Scenario, scheduler: str) -> tuple[Any, Any]:
    """Return the scheduler, and what hashes the blocks of its requests."""
    config = _find("vllm.engine.arg_utils", "EngineArgs")(
        model=model,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=scenario.max_sequences,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=scenario.max_step_tokens,
        enable_prefix_caching=True,
        async_scheduling=scheduler == "run_ahead",
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = scenario.num_blocks
    spec = _find("vllm.v1.kv_cache_interface", "FullAttentionSpec")(
        block_size=BLOCK_SIZE, num_kv_heads=3, head_size=64, dtype=_find("torch", "bfloat16")
    )
    layers = [f"model.layers.{index}.self_attn.attn" for index in range(30)]
    cache = _find("vllm.v1.kv_cache_interface", "KVCacheConfig")(
        num_blocks=scenario.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[_find("vllm.v1.kv_cache_interface", "KVCacheGroupSpec")(layers, spec)],
    )
    hash_function = _find("vllm.utils.hashing", "get_hash_fn_by_name")(config.cache_config.prefix_caching_hash_algo)
    _find("vllm.v1.core.kv_cache_utils", "init_none_hash")(hash_function)
    hasher = _find("vllm.v1.core.kv_cache_utils", "get_request_block_hasher")(BLOCK_SIZE, hash_function)
    peer = _find(*CLASSES[scheduler])(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=_find("vllm.v1.structured_output", "StructuredOutputManager")(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
    )
    return peer, hasher


def _requests(scenario: Scenario, hasher: Any, rng: random.Random) -> Iterator[tuple[Any, int]]:
    """Yield each request and the nanoseconds that making it took, its hashes included."""
    sampling_class, request_class = _find("vllm.sampling_params", "SamplingParams"), _find("vllm.v1.request", "Request")

    def make(drawn: Drawn) -> tuple[Any, int]:
        sampling = sampling_class(temperature=0.0, max_tokens=drawn.max_tokens, ignore_eos=True)
        token_ids = list(drawn.token_ids)
        start_ns = _now_ns()
        request = request_class(drawn.request_id, token_ids, sampling, None, block_hasher=hasher)
        return request, _now_ns() - start_ns

    return map(make, draw_requests(scenario, rng))


def _stepper(peer: Any, is_ahead: bool, rng: random.Random) -> Callable[[], Step]:
    """Return what schedules once and takes one result: of that plan, or of the one before it with run-ahead."""
    output_class = _find("vllm.v1.outputs", "ModelRunnerOutput")
    in_flight: list[tuple[Any, Any]] = []

    def answer(plan: Any) -> Any:
        ids = list(plan.num_scheduled_tokens)
        tokens = [[] if peer.requests[each].is_prefill_chunk else [rng.randrange(VOCAB_SIZE)] for each in ids]
        return output_class(
            req_ids=ids, req_id_to_index={each: at for at, each in enumerate(ids)}, sampled_token_ids=tokens
        )

    def step() -> Step:
        start_ns = _now_ns()
        plan = peer.schedule()
        schedule_ns = _now_ns() - start_ns
        in_flight.append((plan, answer(plan)))
        update_ns = 0
        if len(in_flight) > is_ahead:
            oldest = in_flight.pop(0)
            start_ns = _now_ns()
            peer.update_from_output(*oldest)
            update_ns = _now_ns() - start_ns
        return Step(
            schedule_ns,
            update_ns,
            len(plan.num_scheduled_tokens),
            plan.total_num_scheduled_tokens,
            len(peer.running),
            len(plan.finished_req_ids),
        )

    return step


def main(model: str) -> None:
    """Answer measurements until stdin ends."""
    os.environ.update(QUIET)
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # so that nothing but answers goes out
        _find("torch", "set_num_threads")(1)
        for module, name in CLASSES.values():  # before the forks, which then need not import them
            _find(module, name)
        _find("vllm.v1.structured_output", "StructuredOutputManager")
        answers.write(json.dumps({"version": importlib.import_module("vllm").__version__}) + "\n")
        answers.flush()
        for line in sys.stdin:
            asked = json.loads(line)
            cost = in_child(_measurement(model, asked), asked["cpu"])
            answers.write(json.dumps(cost) + "\n")
            answers.flush()


def _measurement(model: str, asked: dict[str, Any]) -> Callable[[], Cost]:
    return lambda: measure(model, SCENARIOS[asked["scenario"]], asked["scheduler"], asked["gc"], asked["seed"])


if __name__ == "__main__":
    main(sys.argv[1])
