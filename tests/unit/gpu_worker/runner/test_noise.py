"""A seeded row gets the same tokens whatever happens around it, and its history decides what its stages do."""

from typing import Any

import pytest

from gpu_worker.runner.model_runner import ModelRunner
from tests.unit.gpu_worker.tiny import PROMPTS, admission, chunk, decode, plan, run, tiny_runner, tokens_of

SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 9, "max_tokens": 45}
EVERYTHING: dict[str, Any] = SEEDED | {
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": 1.0,
    "logit_bias": {5: 2.0, 60: -3.0},
    "bad_word_ids": ((7,), (5, 5), (60, 61)),
    "min_tokens": 40,
    "stop_token_ids": (8, 9, 10),
    "allowed_token_ids": tuple(range(2, 90)),
}
every_wish = pytest.mark.parametrize("wish", [SEEDED, EVERYTHING], ids=["seed", "everything"])


def alone(wish: dict[str, Any], num_tokens: int = 40) -> tuple[int, ...]:
    runner = tiny_runner()
    first = run(runner, plan(chunk(0, 11, range(16)), admitted=[admission(0, PROMPTS[0], **wish)]))
    return (*first.token_ids, *decode(runner, 0, num_tokens - 1))


def come_back(runner: ModelRunner, row: int, tokens: tuple[int, ...], wish: dict[str, Any]) -> tuple[int, ...]:
    """Release the row that the sequence was in, and admit it into another with the tokens it had."""
    back = admission(row, PROMPTS[0] + tokens, num_prompt_tokens=11, **wish)
    blocks = range(16 * (row % 2), 16 * (row % 2) + 16)
    return run(runner, plan(chunk(row, 11 + len(tokens), blocks), admitted=[back], released=[row - 1])).token_ids


@every_wish
def test_a_row_that_is_preempted_twice_gets_the_tokens_of_one_that_is_not(wish: dict[str, Any]) -> None:
    """B077: preempted at token 10 and at token 30. Penalties and bad words are rebuilt from the history."""
    runner = tiny_runner(num_blocks=32)
    first = run(runner, plan(chunk(0, 11, range(16)), admitted=[admission(0, PROMPTS[0], **wish)]))
    tokens: tuple[int, ...] = first.token_ids

    tokens += decode(runner, 0, 9)
    tokens += come_back(runner, 1, tokens, wish)
    tokens += decode(runner, 1, 19)
    tokens += come_back(runner, 2, tokens, wish)
    tokens += decode(runner, 2, 9 - 1)

    assert len(set(tokens)) > 10
    assert tokens == alone(wish, 39)


@every_wish
@pytest.mark.parametrize("lengths", [(4, 7), (3, 6, 2)])
def test_the_chunks_of_its_prompt_change_no_token(lengths: tuple[int, ...], wish: dict[str, Any]) -> None:
    """B077."""
    runner = tiny_runner()
    run(runner, plan(chunk(0, lengths[0], range(16)), admitted=[admission(0, PROMPTS[0], **wish)]))
    for length in lengths[1:]:
        last = run(runner, plan(chunk(0, length)))

    assert (*last.token_ids, *decode(runner, 0, 19)) == alone(wish, 20)


@every_wish
@pytest.mark.parametrize("neighbour", [{"temperature": 1.0, "seed": 5}, {}, EVERYTHING | {"seed": 77, "logprobs": 2}])
def test_neighbours_of_any_kind_change_no_token(neighbour: dict[str, Any], wish: dict[str, Any]) -> None:
    """B074: one with another seed, a greedy one, one that asks for everything."""
    runner = tiny_runner(num_blocks=64)
    admitted = [admission(row, PROMPTS[row], **(wish if row == 0 else neighbour)) for row in range(4)]
    chunks = [chunk(row, len(PROMPTS[row]), range(row * 16, row * 16 + 16)) for row in (3, 1, 0, 2)]

    results = [run(runner, plan(*chunks, admitted=admitted))]
    for step in range(19):
        order = (0, 1, 2, 3) if step % 2 else (2, 0, 3, 1)
        results.append(run(runner, plan(*(chunk(row, 1) for row in order))))

    assert sum((tokens_of(result)[0] for result in results), ()) == alone(wish, 20)


def test_plans_in_flight_change_nothing_of_what_penalties_and_bad_words_see() -> None:
    """B090: every plan is launched before the result of the one before it is read."""
    wish: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "presence_penalty": 1.0,
        "bad_word_ids": ((77, 28), (15, 9)),
        "max_tokens": 45,
    }
    runner = tiny_runner()

    launched = [runner.launch(plan(chunk(0, 11, range(16)), admitted=[admission(0, PROMPTS[0], **wish)]))]
    launched += [runner.launch(plan(chunk(0, 1))) for _ in range(39)]

    tokens: tuple[int, ...] = sum((pending.result().token_ids for pending in launched), ())
    assert tokens == alone(wish)
    assert tokens[:2] == (69, 77)
    assert (77, 28) not in zip(tokens, tokens[1:], strict=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-6, 1e-30, 1e-45])
def test_very_small_temperatures_give_the_tokens_of_greedy(temperature: float, dtype: str) -> None:
    """B004."""
    runner = tiny_runner(dtype=dtype)
    admitted = [admission(0, PROMPTS[0]), admission(1, PROMPTS[0], temperature=temperature, seed=1)]
    chunks = [chunk(row, 11, range(row * 8, row * 8 + 7)) for row in range(2)]

    results = [run(runner, plan(*chunks, admitted=admitted))]
    results += [run(runner, plan(chunk(0, 1), chunk(1, 1))) for _ in range(15)]

    greedy, cold = (sum((tokens_of(result)[row] for result in results), ()) for row in range(2))
    assert len(greedy) == 16
    assert cold == greedy
