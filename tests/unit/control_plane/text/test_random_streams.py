"""Random outputs in random pieces with random stop strings, against decoding everything and searching it."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from control_plane.text.stream import TextStream
from plugins.types import SamplingParams, TokenId
from tests.unit.control_plane.text.vocabularies import CJK, EMOJI, PARTS, VOCABULARIES, Vocabulary, embedded

REPLACEMENT = "\ufffd"
MAX_SPLIT = 9  # tokens, which can be split in 256 ways


@dataclass(frozen=True)
class Expected:
    """What the rules make of an output."""

    num_tokens: int | None  # of the output, if a stop string ends it
    text: str


def expected(
    vocabulary: Vocabulary, token_ids: Sequence[TokenId], is_stopped: bool, params: SamplingParams
) -> Expected:
    """Decode everything, search, cut. A character is there with the first token after which `decode` shows it."""
    if is_stopped and not params.include_stop_str_in_output:
        token_ids = token_ids[:-1]
    prefixes = [vocabulary.decode(token_ids[:num], params.skip_special_tokens) for num in range(len(token_ids) + 1)]
    text = prefixes[-1]
    ends = sorted((end, -len(stop)) for stop in params.stop for end in ends_of(stop, text))
    for end, negative_length in ends:
        num_tokens = next(num for num, prefix in enumerate(prefixes) if prefix.startswith(text[:end]))
        if num_tokens >= params.min_tokens:
            keeps = params.include_stop_str_in_output
            return Expected(num_tokens, text[:end] if keeps else text[: end + negative_length])
    return Expected(None, text)


def ends_of(part: str, text: str) -> list[int]:
    starts = [start for start in range(len(text)) if text.startswith(part, start)]
    return [start + len(part) for start in starts]


def cuts(token_ids: Sequence[TokenId], rng: random.Random) -> Iterator[Sequence[TokenId]]:
    start = 0
    while start < len(token_ids):
        end = min(len(token_ids), start + rng.choice((1, 1, 1, 2, 3, 7, 50)))
        yield token_ids[start:end]
        start = end


def draw_stop(text: str, rng: random.Random) -> tuple[str, ...]:
    """A few stop strings: mostly parts of the text, some with another end, some of anything."""
    stops = []
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text) + 1)
        part = text[start : start + rng.choice((1, 2, 3, 5, 9))]
        stop = rng.choice((part, part, part, part[:-1] + rng.choice(PARTS), rng.choice(PARTS)))
        stops.append(stop.rstrip(REPLACEMENT) or "STOP")  # when a wrong byte is certain, decode does not tell
    return tuple(stops)


def play(
    stream: TextStream, pieces: Iterator[Sequence[TokenId]], is_stopped: bool, num_left: int
) -> tuple[int | None, str]:
    """Push the pieces; return how many tokens the output has if a stop string ended it, and its text."""
    texts, num_tokens = [], 0
    for piece in pieces:
        num_left -= len(piece)
        ended = stream.push(piece, is_stopped and num_left == 0)
        texts.append(stream.take())
        if ended is not None:
            return num_tokens + ended, "".join(texts) + stream.close()
        num_tokens += len(piece)
    return None, "".join(texts) + stream.close()


@pytest.mark.parametrize("kind", VOCABULARIES)
@pytest.mark.parametrize("num", [3_400, pytest.param(34_000, marks=pytest.mark.long)])
def test_a_stream_gives_what_decoding_everything_and_searching_it_gives(kind: str, num: int) -> None:
    """B027, B032, B034, B035."""
    vocabulary = VOCABULARIES[kind]()
    num_stopped = 0

    for seed in range(num):
        rng = random.Random(seed)
        is_stopped = rng.random() < 0.2
        token_ids = vocabulary.draw(rng) + [rng.choice(vocabulary.stop_token_ids)] * is_stopped
        skips = rng.random() < 0.7
        params = SamplingParams(
            stop=draw_stop(vocabulary.decode(token_ids, skips), rng),
            include_stop_str_in_output=rng.random() < 0.3,
            skip_special_tokens=skips,
            min_tokens=rng.choice((0, 0, 0, 3, 8)),
        )

        found = play(vocabulary.model.stream(params), cuts(token_ids, rng), is_stopped, len(token_ids))

        right = expected(vocabulary, token_ids, is_stopped, params)
        assert found == (right.num_tokens, right.text), f"seed {seed}"
        num_stopped += right.num_tokens is not None
    assert num_stopped > num // 2


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_what_could_begin_a_stop_string_is_held_back_and_nothing_else(kind: str) -> None:
    """B032."""
    vocabulary = VOCABULARIES[kind]()

    for seed in range(300):
        rng = random.Random(seed)
        token_ids = vocabulary.spell("".join(rng.choices(PARTS, k=5)))
        stop = draw_stop(vocabulary.decode(token_ids), rng)
        stream, given = vocabulary.model.stream(SamplingParams(stop=stop)), ""
        for num, token_id in enumerate(token_ids, start=1):
            if stream.push([token_id]) is not None:
                break
            given += stream.take()
            text = vocabulary.decode(token_ids[:num])
            if REPLACEMENT in text:  # an incomplete character is held back too
                continue
            starts = [part[:length] for part in stop for length in range(len(part))]
            held = max((start for start in starts if text.endswith(start)), key=len)

            assert given + held == text, f"seed {seed}"


@pytest.mark.parametrize("kind", VOCABULARIES)
@pytest.mark.parametrize("num", [100, pytest.param(1_000, marks=pytest.mark.long)])
def test_every_split_of_emoji_and_cjk_comes_out_whole(kind: str, num: int) -> None:
    """B027."""
    vocabulary = VOCABULARIES[kind]()

    for seed in range(num):
        rng = random.Random(seed)
        text = "".join(rng.choices(EMOJI + CJK, k=rng.randint(2, 4)))
        while len(token_ids := vocabulary.spell(text)) > MAX_SPLIT:
            text = text[:-1]
        params = SamplingParams(stop=(rng.choice(text),))
        right = expected(vocabulary, token_ids, False, params)
        for pieces in splits(token_ids):
            plain, watched = vocabulary.model.stream(SamplingParams()), vocabulary.model.stream(params)

            texts = []
            for piece in pieces:
                plain.push(piece)
                texts.append(plain.take())

            assert REPLACEMENT not in "".join(texts)
            assert "".join(texts) + plain.close() == text
            assert play(watched, iter(pieces), False, len(token_ids)) == (right.num_tokens, right.text)


def splits(token_ids: Sequence[TokenId]) -> Iterator[list[Sequence[TokenId]]]:
    for ends in itertools.product((False, True), repeat=len(token_ids) - 1):
        places = [0, *(place for place, is_end in enumerate(ends, start=1) if is_end), len(token_ids)]
        yield [token_ids[start:end] for start, end in itertools.pairwise(places)]


def test_a_stop_string_that_begins_in_a_token_and_ends_in_a_later_one_gives_no_text_twice() -> None:
    """B035."""
    vocabulary, num_pairs = embedded(), 0

    for seed in range(1_000):
        rng = random.Random(seed)
        token_ids = vocabulary.spell(
            "".join(rng.choices((" Paris", " is", " lovely", " in", " spring,", " they say."), k=8))
        )
        text = vocabulary.decode(token_ids)
        first = len(vocabulary.decode(token_ids[: rng.randint(1, 5)]))  # a token ends here
        stop = text[first - rng.randint(1, 2) : first + rng.randint(1, 9)]
        stream, given = vocabulary.model.stream(SamplingParams(stop=(stop,))), ""
        for token_id in token_ids:
            ended = stream.push([token_id])
            given += stream.take()

            assert text[: text.index(stop)].startswith(given)
            if ended is not None:
                break

        assert given + stream.close() == text[: text.index(stop)]
        num_pairs += stream.stop_string == stop
    assert num_pairs == 1_000
