"""The logits processors that come with Dihedral, by their short names, in an engine that runs in this process."""

from collections.abc import Iterator
from typing import Any

import pytest

from control_plane.engine.local import LocalEngine
from plugins.builtin.watermark_detector import detect
from plugins.errors import InvalidConfig, InvalidRequest
from plugins.types import SamplingParams

SECRET = "a key of these tests"
PROMPT = [11, 12, 13]


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine(
        logits_processors=["ngram_repetition", "thinking_budget", "watermark"],
        logits_processor_config={"watermark": {"key": SECRET}, "thinking_budget": {"start": [98], "end": [99]}},
        load_format="dummy",
        dtype="float32",
        threads=1,
        num_blocks=64,
    ) as made:
        yield made


def outputs(engine: LocalEngine, *each: dict[str, Any], temperature: float = 0.0) -> list[tuple[int, ...]]:
    """Generate side by side: one output for each of these arguments; empty if it fails."""
    found: dict[str, tuple[int, ...]] = {}
    for args in each:
        sampling = SamplingParams(
            max_tokens=60, temperature=temperature, seed=5, ignore_eos=True, detokenize=False, extra_args=args
        )
        found[engine.add_request("", PROMPT, sampling)] = ()
    while engine.has_work():
        for delivery in engine.step():
            found[delivery.request_id] += delivery.token_ids
    return list(found.values())


def num_repeated_pairs(token_ids: tuple[int, ...]) -> int:
    pairs = list(zip(token_ids, token_ids[1:], strict=False))
    return len(pairs) - len(set(pairs))


def test_each_request_gets_what_it_asked_for_and_its_neighbours_do_not(engine: LocalEngine) -> None:
    """B080, B090: runs ahead, and counts the token before."""
    thinking = {"thinking_budget": 5, "thinking_open": True, "thinking_end": [100, 101]}
    (alone,) = outputs(engine, {})

    plain, broken, thought = outputs(engine, {}, {"no_repeat_ngram_size": 2}, thinking)

    assert plain == alone
    assert num_repeated_pairs(alone) > 0
    assert thought[:5] == alone[:5]
    assert thought[5:7] == (100, 101)
    assert num_repeated_pairs(broken) == 0


def test_marked_output_is_found_and_other_output_is_not(engine: LocalEngine) -> None:
    vocab_size = engine.model.worker.model.vocab_size

    marked, plain = outputs(engine, {"watermark": True, "watermark_delta": 4.0}, {}, temperature=1.0)

    assert detect(marked, SECRET, 0.25, vocab_size).z_score > 4
    assert abs(detect(plain, SECRET, 0.25, vocab_size).z_score) < 3


@pytest.mark.parametrize(
    ("args", "field", "reason"),
    [
        ({"watermark": "x"}, "sampling.extra_args.watermark", "SCHEMA_VIOLATION"),
        ({"no_repeat_ngram_size": 17}, "sampling.extra_args.no_repeat_ngram_size", "SCHEMA_VIOLATION"),
        ({"thinking_budget": 1.5}, "sampling.extra_args.thinking_budget", "SCHEMA_VIOLATION"),
        ({"thinking_budgets": 1}, "sampling.extra_args.thinking_budgets", "UNKNOWN_ARGUMENT"),
        (
            {"thinking_budget": 1, "thinking_start": [5], "thinking_end": [5]},
            "sampling.extra_args",
            "REFUSED_BY_PROCESSOR",
        ),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_at_admission(
    engine: LocalEngine, args: dict[str, Any], field: str, reason: str
) -> None:
    """B085."""
    with pytest.raises(InvalidRequest) as refused:
        outputs(engine, args)

    assert [(each.field, each.reason) for each in refused.value.violations] == [(field, reason)]


@pytest.mark.parametrize("name", ["thinking_budget", "watermark"])
def test_one_without_its_section_stops_the_start_and_names_the_key(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"{name} .*failed in __init__.* in plugins.logits_processor_config"):
        LocalEngine(logits_processors=[name], load_format="dummy", dtype="float32", threads=1, num_blocks=64)


def test_marks_that_the_model_has_no_tokens_for_fail_nobody(engine: LocalEngine) -> None:
    (alone,) = outputs(engine, {})

    (asked,) = outputs(engine, {"thinking_budget": 3, "thinking_open": True, "thinking_end": [10**6]})

    assert asked == alone
