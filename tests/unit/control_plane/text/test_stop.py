"""Texts that are looked for in a text that grows."""

from hypothesis import given
from hypothesis import strategies as st

from control_plane.text.stop import Match, StopStrings

FEW_LETTERS = st.text("ab", max_size=12)


def read(texts: list[str], *pieces: str) -> list[Match | None]:
    stops = StopStrings(texts)
    state, matches = 0, []
    for piece in pieces:
        state, match = stops.read(state, piece)
        matches.append(match)
    return matches


def num_held(texts: list[str], text: str) -> int:
    stops = StopStrings(texts)
    state, _ = stops.read(0, text, may_match=False)
    return stops.num_held(state)


def test_a_text_is_found_in_one_piece() -> None:
    assert read(["END"], "the END of it") == [Match(end=7, length=3)]


def test_a_text_is_found_across_pieces_and_its_end_is_told_in_the_last() -> None:
    assert read(["END"], "the E", "N", "D!") == [None, None, Match(end=1, length=3)]


def test_the_text_that_ends_first_is_found_though_another_begins_before_it() -> None:
    assert read(["STOP", "TO"], "STOP") == [Match(end=3, length=2)]


def test_the_longest_of_those_that_end_together_is_found() -> None:
    assert read(["OP", "STOP", "P"], "STOP") == [Match(end=4, length=4)]


def test_a_text_is_found_behind_a_start_that_led_nowhere() -> None:
    assert read(["aab"], "aaab") == [Match(end=4, length=3)]


def test_an_empty_text_is_never_found() -> None:
    """B024."""
    assert read([""], "some", "text") == [None, None]
    assert read(["", "END"], "some END") == [Match(end=8, length=3)]


def test_what_may_begin_a_text_is_held_and_nothing_else() -> None:
    assert num_held(["STOP"], "a STO") == 3
    assert num_held(["STOP"], "a STOR") == 0
    assert num_held(["STOP", "TORN"], "a STOR") == 3


def test_a_text_that_may_not_match_is_held_as_far_as_it_may_begin_another() -> None:
    assert num_held(["aa"], "aa") == 1
    assert num_held(["aa", "aab"], "aa") == 2
    assert num_held(["ab"], "ab") == 0


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=5), st.lists(FEW_LETTERS, max_size=5))
def test_reading_in_pieces_finds_what_a_search_in_the_whole_finds(texts: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    ends = [(whole.index(text) + len(text), -len(text)) for text in texts if text in whole]

    start, found = 0, None
    for piece, match in zip(pieces, read(texts, *pieces), strict=True):
        if match is not None:
            found = (start + match.end, -match.length)
            break
        start += len(piece)

    assert found == (min(ends) if ends else None)


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=5), FEW_LETTERS)
def test_the_longest_end_that_begins_a_text_is_held(texts: list[str], text: str) -> None:
    starts = {each[:length] for each in texts for length in range(len(each))}

    assert num_held(texts, text) == max(len(start) for start in starts if text.endswith(start))
