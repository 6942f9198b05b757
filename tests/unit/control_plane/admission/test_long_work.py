"""Long work runs beside the event loop, a bounded number of pieces at once."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from control_plane.admission.long_work import MAX_INLINE_BYTES, LongWork
from plugins.errors import QueueFull

LONG = MAX_INLINE_BYTES + 1


@pytest.fixture
async def work() -> AsyncIterator[LongWork]:
    long_work = LongWork(max_reading=2)
    yield long_work
    long_work.close()


async def test_short_work_is_done_at_once_and_long_work_in_a_thread(work: LongWork) -> None:
    places = [await work.run(num_bytes, threading.current_thread) for num_bytes in (MAX_INLINE_BYTES, LONG)]

    assert [place is threading.current_thread() for place in places] == [True, False]


async def test_what_the_work_raises_reaches_its_caller(work: LongWork) -> None:
    def fail() -> None:
        raise ValueError("bad prompt")

    with pytest.raises(ValueError, match="bad prompt"):
        await work.run(LONG, fail)


async def test_more_than_the_limit_is_refused_until_some_has_ended(work: LongWork) -> None:
    go = threading.Event()
    running = [asyncio.create_task(work.run(LONG, go.wait)) for _ in range(2)]
    await asyncio.sleep(0)  # lets both begin

    with pytest.raises(QueueFull, match="2 requests are waiting; at most 2 may"):
        await work.run(LONG, go.wait)
    short = await work.run(1, lambda: "short")
    go.set()
    await asyncio.gather(*running)

    assert short == "short"
    assert await work.run(LONG, lambda: "long") == "long"


async def test_work_whose_caller_has_gone_counts_until_it_ends(work: LongWork) -> None:
    go, begun = threading.Event(), threading.Barrier(3)

    def wait() -> None:
        begun.wait()
        go.wait()

    running = [asyncio.create_task(work.run(LONG, wait)) for _ in range(2)]
    await asyncio.to_thread(begun.wait, 10)
    for task in running:
        task.cancel()
    await asyncio.wait(running)

    with pytest.raises(QueueFull):
        await work.run(LONG, lambda: None)
    go.set()


async def test_slow_work_of_any_size_has_threads_of_its_own(work: LongWork) -> None:
    """B097: grammars that take seconds to try never hold a prompt up."""
    go = threading.Event()
    slow = [asyncio.create_task(work.run(1, go.wait, is_slow=True)) for _ in range(2)]
    await asyncio.sleep(0)  # lets both begin

    with pytest.raises(QueueFull):
        await work.run(1, go.wait, is_slow=True)
    long = await work.run(LONG, lambda: "long")
    go.set()

    assert long == "long"
    assert await asyncio.gather(*slow) == [True, True]
