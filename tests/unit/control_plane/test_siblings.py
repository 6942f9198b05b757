"""Samples of one prompt: they share blocks with the request that they name, and with nothing else of its name."""

from dataclasses import replace

from control_plane.admission.config import AdmissionConfig
from control_plane.engine.core import EngineCore
from control_plane.engine.router import RoundRobin
from control_plane.scheduling.config import SchedulerConfig
from control_plane.scheduling.run_ahead import RunAheadScheduler
from plugins.types import GenerationId, Request, RequestId, WorkerId
from tests.fakes import FakeWorker, request, worker_info

CONFIG = SchedulerConfig(prefix_hash_key="a key for these tests")
PROMPT = range(3, 13)  # ten tokens: two blocks of four and a half


def sample(request_id: str, leader: str, prompt: range = PROMPT, salt: str = "") -> Request:
    return replace(request(request_id, prompt), sibling_of=RequestId(leader), cache_salt=salt)


def scheduler_that_computed(first: Request) -> tuple[RunAheadScheduler, FakeWorker]:
    scheduler, worker = RunAheadScheduler(CONFIG, worker_info()), FakeWorker()
    scheduler.add_request(first)
    scheduler.update(worker.execute(scheduler.schedule()))
    return scheduler, worker


def test_a_sample_computes_the_last_token_of_the_prompt_alone() -> None:
    scheduler, worker = scheduler_that_computed(request("a", PROMPT))
    scheduler.add_request(sample("b", "a"))

    plan = scheduler.schedule()

    assert plan.admitted[0].num_cached_tokens == 9
    worker.execute(plan)


def test_a_sample_shares_nothing_with_another_prompt_that_has_the_name_by_now() -> None:
    scheduler, worker = scheduler_that_computed(request("a", range(100, 110)))
    scheduler.add_request(sample("b", "a"))

    plan = scheduler.schedule()

    assert plan.admitted[0].num_cached_tokens == 0
    worker.execute(plan)


def test_a_sample_shares_nothing_with_the_same_prompt_under_another_salt() -> None:
    scheduler, _ = scheduler_that_computed(request("a", PROMPT))
    scheduler.add_request(sample("b", "a", salt="mine"))

    assert scheduler.schedule().admitted[0].num_cached_tokens == 0


def test_a_request_that_names_itself_does_not_wait_for_itself() -> None:
    scheduler = RunAheadScheduler(CONFIG, worker_info())

    scheduler.add_request(sample("a", "a"))

    assert [admission.request_id for admission in scheduler.schedule().admitted] == ["a"]


def test_a_sample_of_another_generation_does_not_follow_to_a_worker_of_the_old_one() -> None:
    core = EngineCore(lambda worker: RunAheadScheduler(CONFIG, worker), AdmissionConfig(), RoundRobin())
    old, new = WorkerId("old"), WorkerId("new")
    for worker_id, generation in ((old, "1"), (new, "2")):
        core.connect(worker_id)
        core.attach(worker_id, worker_info(), GenerationId(generation), now_s=0.0)
    core.submit(request("a", PROMPT), GenerationId("1"), now_s=0.0)

    core.submit(sample("b", "a"), GenerationId("2"), now_s=0.0)

    assert (core.num_live(old), core.num_live(new)) == (1, 1)
