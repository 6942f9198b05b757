"""The output of one request between the engine and its reader."""

import asyncio

from control_plane.engine.streams import Output, OutputStream
from plugins.errors import ReaderTooSlow
from plugins.types import FinishReason, TokenId

A, B, C = TokenId(3), TokenId(4), TokenId(5)


async def test_what_was_not_read_comes_in_one_output() -> None:
    stream = OutputStream()
    stream.put((A,), None, None, now_s=1.0, num_cached_tokens=16)
    stream.put((B, C), None, None, now_s=2.0)
    both = await stream.next()
    stream.put((), FinishReason.STOP, None, now_s=3.0)

    assert both == Output((A, B, C), num_cached_tokens=16)
    assert await stream.next() == Output((), FinishReason.STOP, num_cached_tokens=16)


async def test_output_is_unread_from_the_first_put_until_it_is_fetched() -> None:
    stream = OutputStream()
    times = [stream.unread_since_s]
    stream.put((A,), None, None, now_s=1.0)
    stream.put((B,), None, None, now_s=2.0)
    times.append(stream.unread_since_s)
    await stream.next()
    times.append(stream.unread_since_s)
    stream.put((C,), None, None, now_s=3.0)
    times.append(stream.unread_since_s)

    assert times == [None, 1.0, None, 3.0]


async def test_a_reader_that_waits_is_woken_by_the_next_output() -> None:
    stream = OutputStream()
    reading = asyncio.create_task(stream.next())
    await asyncio.sleep(0)

    stream.put((A,), None, None, now_s=0.0)

    assert await reading == Output((A,))


async def test_output_for_a_reader_that_has_gone_is_kept() -> None:
    stream = OutputStream()
    reading = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait((reading,))

    error = ReaderTooSlow(60.0)
    stream.put((A,), None, None, now_s=0.0)
    stream.put((), FinishReason.FAILED, error, now_s=60.0)

    assert stream.is_ended
    assert await stream.next() == Output((A,), FinishReason.FAILED, error)
