"""Text models are read once for all workers that share a tokenizer and its template."""

import asyncio
from dataclasses import replace

import pytest

from control_plane.text.model import TextModel
from control_plane.workers.text_models import TextModels
from plugins.errors import WorkerLost
from plugins.types import TokenizerBundle
from tests.unit.control_plane.fake_driver import Handle, described


class CountingReader:
    """Parses, and counts how often."""

    def __init__(self) -> None:
        self.num_read = 0

    async def __call__(self, bundle: TokenizerBundle) -> TextModel:
        self.num_read += 1
        await asyncio.sleep(0)
        return TextModel.from_bundle(bundle)


async def test_workers_that_ask_together_or_later_get_the_same_model() -> None:
    read = CountingReader()
    texts = TextModels(read)
    handles = [Handle(described()) for _ in range(4)]

    together = await asyncio.gather(*(texts.of(described(), handle) for handle in handles[:3]))
    later = await texts.of(described(), handles[3])

    assert {id(text) for text in (*together, later)} == {id(later)}
    assert (read.num_read, [handle.num_fetched for handle in handles]) == (1, [1, 0, 0, 0])


async def test_other_weights_may_come_with_another_template() -> None:
    read = CountingReader()
    texts = TextModels(read)

    for version in ("aa", "bb", "aa"):
        await texts.of(described(weights_version=version), Handle(described()))

    assert read.num_read == 2


async def test_when_the_first_one_fails_the_next_one_is_asked() -> None:
    class Failing(Handle):
        async def tokenizer(self) -> TokenizerBundle:
            raise WorkerLost("it was killed")

    texts = TextModels(CountingReader())

    first, second = await asyncio.gather(
        texts.of(described(), Failing(described())), texts.of(described(), Handle(described())), return_exceptions=True
    )

    assert isinstance(first, WorkerLost)
    assert isinstance(second, TextModel)


async def test_a_tokenizer_that_is_not_the_described_one_is_refused() -> None:
    texts = TextModels(CountingReader())

    with pytest.raises(WorkerLost, match="it says none"):
        await texts.of(replace(described(), tokenizer_sha256=""), Handle(described()))


async def test_eight_models_are_kept_and_the_one_that_was_used_longest_ago_is_read_again() -> None:
    read = CountingReader()
    texts = TextModels(read)
    for number in range(8):
        await texts.of(described(weights_version=str(number)), Handle(described()))
    await texts.of(described(weights_version="0"), Handle(described()))
    await texts.of(described(weights_version="8"), Handle(described()))
    full = read.num_read

    await texts.of(described(weights_version="0"), Handle(described()))
    still = read.num_read
    await texts.of(described(weights_version="1"), Handle(described()))

    assert (full, still, read.num_read) == (9, 9, 10)
