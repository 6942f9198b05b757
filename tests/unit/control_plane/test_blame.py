"""Who has to answer for a worker's death, and how many deaths tell."""

import pytest

from control_plane.engine.live import Live
from control_plane.engine.recovery import is_culprit, judge_death
from plugins.types import GenerationId
from tests.unit.control_plane.driving import asking


def some_live(name: str, num_tokens_here: int) -> Live:
    return Live(asking(name), GenerationId("g"), num_tokens_here=num_tokens_here)


def test_one_token_settles_nobody_because_what_kills_may_be_the_first_decode() -> None:
    begun, settled = some_live("a", 1), some_live("b", 2)

    suspects = judge_death({begun, settled})

    assert suspects == {begun}
    assert (begun.blame, settled.blame) == (1.0, 0.0)


def test_the_blame_is_shared_by_those_in_doubt_and_more_than_one_whole_death_makes_the_culprit() -> None:
    killer, other = some_live("a", 0), some_live("b", 0)
    first = judge_death({killer, other})
    shares = (killer.blame, other.blame)
    is_known = is_culprit(killer)

    second = judge_death({killer})

    assert (first, second) == ({killer, other}, {killer})
    assert shares == (0.5, 0.5)
    assert (is_known, is_culprit(killer), is_culprit(other)) == (False, True, False)


@pytest.mark.parametrize("num_newcomers", [1, 3, 20])
def test_the_third_death_tells_however_many_newcomers_stood_beside_the_suspect(num_newcomers: int) -> None:
    killer, deaths = some_live("killer", 0), 0
    while not is_culprit(killer):
        killer.is_suspect = deaths > 0
        newcomers = {some_live(f"{deaths}/{number}", 0) for number in range(num_newcomers)}
        judge_death({killer, *newcomers})
        deaths += 1
        assert not any(map(is_culprit, newcomers))

    assert deaths == 3


def test_an_innocent_suspect_that_was_tried_beside_the_culprit_is_not_taken_for_it() -> None:
    innocent, other, killer = some_live("a", 0), some_live("b", 0), some_live("c", 0)
    judge_death({innocent, other})
    innocent.is_suspect = True

    judge_death({innocent, killer})

    assert not is_culprit(innocent)


def test_if_all_had_settled_all_are_suspected_and_nobody_is_blamed() -> None:
    everybody = {some_live("a", 5), some_live("b", 9)}

    assert judge_death(everybody) == everybody
    assert {live.blame for live in everybody} == {0.0}
