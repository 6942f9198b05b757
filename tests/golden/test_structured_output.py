"""What the embedded model writes fits what was asked for, in JSON, in expressions and in grammars."""

import json
import re
from collections.abc import Callable, Iterator, Sequence

import jsonschema
import pytest

from control_plane.engine.local import LocalEngine
from control_plane.scheduling.config import SchedulerConfig
from plugins.types import FinishReason, RequestId, SamplingParams, StructuredOutput, TokenId
from tests.golden.schemas import nesting, random_schema

MAX_TOKENS = 256
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 6},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
            },
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}

Output = tuple[str, FinishReason]


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    scheduler = SchedulerConfig(max_sequences=32, max_step_tokens=512)
    with LocalEngine(scheduler=scheduler, max_model_len=512, max_sequences=32, threads=1) as engine:
        yield engine


def complete(engine: LocalEngine, requests: Sequence[tuple[str, SamplingParams]]) -> list[Output]:
    """Complete every prompt with parameters of its own, all together."""
    names = [engine.add_request("", prompt, sampling) for prompt, sampling in requests]
    tokens: dict[RequestId, list[TokenId]] = {name: [] for name in names}
    ends: dict[RequestId, FinishReason] = {}
    while engine.has_work():
        for delivery in engine.step():
            tokens[delivery.request_id] += delivery.token_ids
            if delivery.finish is not None:
                assert delivery.error is None
                ends[delivery.request_id] = delivery.finish
    return [(engine.model.text.decode(tokens[name]), ends[name]) for name in names]


def structured(
    output: StructuredOutput,
    number: int = 0,
    min_tokens: int = 0,
    max_tokens: int = MAX_TOKENS,
    temperature: float = 0.7,
) -> SamplingParams:
    """Greedy and at the temperature, in turn."""
    return SamplingParams(
        temperature=temperature * (number % 2),
        seed=number,
        structured_output=output,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
    )


@pytest.mark.parametrize("num_schemas", [20, pytest.param(200, marks=pytest.mark.long)])
def test_a_text_that_ends_is_a_value_of_its_schema(engine: LocalEngine, num_schemas: int) -> None:
    """Nine in ten end within 256 tokens; the others are cut, and say so."""
    schemas = [random_schema(number) for number in range(num_schemas)]
    requests = []
    for number, schema in enumerate(schemas):
        prompt = f"Here is some JSON with {', '.join(schema['properties'])}:\n"
        output = StructuredOutput(json_schema=json.dumps(schema))
        requests.append((prompt, structured(output, number // 2)))

    outputs = complete(engine, requests)

    ended = [
        (text, schema) for (text, finish), schema in zip(outputs, schemas, strict=True) if finish is FinishReason.STOP
    ]
    for text, schema in ended:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    assert {finish for _, finish in outputs} <= {FinishReason.STOP, FinishReason.LENGTH}
    assert len(ended) >= 0.9 * num_schemas
    assert sum(nesting(schema) >= 3 for schema in schemas) >= num_schemas // 2


def test_a_recursive_schema_gives_a_value_as_deep_as_the_model_likes(engine: LocalEngine) -> None:
    output = StructuredOutput(json_schema=json.dumps(TREE))

    outputs = complete(engine, [("A tree:\n", structured(output, number, max_tokens=96)) for number in range(4)])

    ended = [text for text, finish in outputs if finish is FinishReason.STOP]
    for text in ended:
        jsonschema.validate(json.loads(text), TREE)
    assert ended


def test_any_object_an_expression_a_choice_and_a_grammar_are_each_held_to(engine: LocalEngine) -> None:
    """B097: the expression with 50 times (a|aa)+b is read as fast as any other, and is served."""
    kinds: list[tuple[StructuredOutput, Callable[[str], object]]] = [
        (StructuredOutput(json_object=True), lambda text: isinstance(json.loads(text), dict)),
        (StructuredOutput(regex=r"[A-Z][a-z]{2,8}, \d{4}"), re.compile(r"[A-Z][a-z]{2,8}, \d{4}").fullmatch),
        (StructuredOutput(regex="(a|aa)+b" * 50), re.compile("([a]+b){50}").fullmatch),
        (StructuredOutput(choice=("yes", "no", 'may "be"\n')), ("yes", "no", 'may "be"\n').__contains__),
        (StructuredOutput(grammar='start: "<" NAME ">"\nNAME: /[a-z]{1,9}/'), re.compile("<[a-z]{1,9}>").fullmatch),
    ]
    requests = [
        ("The answer is ", structured(output, number, max_tokens=110)) for output, _ in kinds for number in range(2)
    ]

    outputs = complete(engine, requests)

    for index, (text, finish) in enumerate(outputs):
        if finish is FinishReason.STOP:
            assert kinds[index // 2][1](text), text
    assert sum(finish is FinishReason.STOP for _, finish in outputs) >= 8


@pytest.mark.parametrize("number", [0, 1], ids=["greedy", "drawn"])
def test_where_a_grammar_leaves_nothing_but_the_end_min_tokens_gives_way(engine: LocalEngine, number: int) -> None:
    """B087: 64 tokens are asked for, and the grammar has texts of one or two."""
    outputs = [
        StructuredOutput(json_schema='{"type": "boolean"}'),
        StructuredOutput(json_schema='{"enum": ["a"]}'),
        StructuredOutput(choice=("yes",)),
        StructuredOutput(regex="[ab]{3}"),
    ]

    answers = complete(
        engine, [("It is ", structured(output, number, min_tokens=64, temperature=1.0)) for output in outputs]
    )

    assert [finish for _, finish in answers] == [FinishReason.STOP] * 4
    assert answers[0][0] in ("true", "false")
    assert [text for text, _ in answers[1:3]] == ['"a"', "yes"]
    assert re.fullmatch("[ab]{3}", answers[3][0])


def test_min_tokens_holds_where_the_grammar_lets_the_text_go_on(engine: LocalEngine) -> None:
    sampling = structured(StructuredOutput(regex="(a ?)*"), min_tokens=20, max_tokens=40)

    ((text, _),) = complete(engine, [("aaa", sampling)])

    assert len(engine.model.text.encode(text)) >= 10
    assert set(text) <= {"a", " "}
