"""Prompts have the exact number of tokens, whatever the tokenizer adds, and depend on the seed alone."""

from collections.abc import Sequence

import pytest

from benchmarks.prompts import CANDIDATES, WordList


def word_tokenizer(num_extra: int = 0, num_pieces: int = 1, whole: frozenset[str] = frozenset()) -> "WordTokenizer":
    return WordTokenizer(num_extra, num_pieces, whole)


class WordTokenizer:
    """So many tokens for each word, one for those in `whole`, and some more for every text."""

    def __init__(self, num_extra: int, num_pieces: int, whole: frozenset[str]) -> None:
        self._num_extra, self._num_pieces, self._whole = num_extra, num_pieces, whole

    async def __call__(self, text: str) -> Sequence[int]:
        counts = [1 if word in self._whole else self._num_pieces for word in text.split()]
        return [0] * (self._num_extra + sum(counts))


@pytest.mark.parametrize("num_extra", [0, 1])
@pytest.mark.parametrize(("num_prefix", "num_distinct"), [(0, 128), (512, 32), (0, 1024)])
async def test_a_prompt_has_exactly_the_tokens_asked_for(num_extra: int, num_prefix: int, num_distinct: int) -> None:
    tokenize = word_tokenizer(num_extra)
    words = await WordList.measure(tokenize)

    prompts = words.prompts(num_prefix, num_distinct, seed=3)

    assert len(await tokenize(prompts[0])) == num_prefix + num_distinct
    assert len(await tokenize(prompts[7])) == num_prefix + num_distinct


async def test_prompts_share_their_prefix_and_nothing_else() -> None:
    words = await WordList.measure(word_tokenizer())

    prompts = words.prompts(512, 32, seed=3)

    first, second = prompts[0].split(), prompts[1].split()
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]


async def test_the_same_seed_gives_the_same_prompts_and_another_gives_others() -> None:
    words = await WordList.measure(word_tokenizer())

    assert words.prompts(8, 8, seed=1)[5] == words.prompts(8, 8, seed=1)[5]
    assert words.prompts(8, 8, seed=1)[5] != words.prompts(8, 8, seed=2)[5]
    assert words.prompts(8, 8, seed=1)[5] != words.prompts(8, 8, seed=1)[6]


async def test_words_of_several_tokens_are_left_out() -> None:
    tokenize = word_tokenizer(num_extra=1, num_pieces=2, whole=frozenset({"time", "river", "music", "north"}))

    words = await WordList.measure(tokenize)

    assert words.words == ("time", "music", "north")
    assert len(await tokenize(words.prompts(0, 64, seed=1)[0])) == 64


async def test_a_tokenizer_without_whole_words_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^0 of \d+ common words are one token"):
        await WordList.measure(word_tokenizer(num_pieces=3))


def test_the_candidates_are_different_words() -> None:
    assert len(set(CANDIDATES)) == len(CANDIDATES)
