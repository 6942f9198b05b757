"""The virtual loop: time passes only where everybody waits, and who waits for ever is found."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from tests.simulation.virtual_loop import Deadlock, VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def run(loop: VirtualLoop, work: Coroutine[Any, Any, Any]) -> Any:
    return loop.run_until_complete(work)


def test_an_hour_passes_at_once(loop: VirtualLoop) -> None:
    run(loop, asyncio.sleep(3600))

    assert loop.time() == 3600


def test_timers_run_in_the_order_of_their_times(loop: VirtualLoop) -> None:
    ran: list[str] = []

    loop.call_later(2, ran.append, "later")
    loop.call_later(1, ran.append, "sooner")
    run(loop, asyncio.sleep(3))

    assert ran == ["sooner", "later"]


def test_after_a_stall_all_that_was_due_runs_late(loop: VirtualLoop) -> None:
    ran: list[float] = []
    for delay_s in (1, 2):
        loop.call_later(delay_s, lambda: ran.append(loop.time()))

    loop.stall(5)
    run(loop, asyncio.sleep(0.5))

    assert ran == [5, 5]
    assert (loop.time(), loop.stalled_s) == (5.5, 5)


def test_a_timeout_needs_no_time_to_pass(loop: VirtualLoop) -> None:
    with pytest.raises(TimeoutError):
        run(loop, asyncio.wait_for(asyncio.Event().wait(), 60))

    assert loop.time() == 60
    assert loop.num_timers() == 0


def test_work_for_a_thread_is_done_at_once(loop: VirtualLoop) -> None:
    assert run(loop, asyncio.to_thread(lambda: 7)) == 7


def test_what_work_for_a_thread_raises_is_raised(loop: VirtualLoop) -> None:
    with pytest.raises(ZeroDivisionError):
        run(loop, asyncio.to_thread(lambda: 1 // 0))


def test_waiting_for_what_nobody_will_do_is_a_deadlock(loop: VirtualLoop) -> None:
    task = loop.create_task(asyncio.Event().wait())

    with pytest.raises(Deadlock):
        loop.run_until_complete(task)

    task.cancel()
    run(loop, asyncio.sleep(0))
