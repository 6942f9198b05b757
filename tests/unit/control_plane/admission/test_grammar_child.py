"""A constraint becomes a grammar that allows what it means, or is refused with the reason."""

import functools
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from control_plane.admission.grammar_child import judge
from control_plane.admission.grammar_text import Refused
from gpu_worker.loading.embedded import embedded_model
from gpu_worker.loading.gguf_file import read_gguf
from gpu_worker.loading.gguf_tokenizer import tokenizer_bundle
from tests.unit.control_plane.text.byte_level import bundle


@functools.cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer(bundle().tokenizer_json.decode(), eos_token=[2])


@functools.cache
def embedded_tokenizer() -> LLTokenizer:
    """One of 49,152 tokens, with which a text takes more ways."""
    return LLTokenizer(tokenizer_bundle(read_gguf(embedded_model())).tokenizer_json.decode(), eos_token=[2])


def fits(kind: str, constraint: str, text: str) -> bool:
    """Ask whether a whole text is allowed, token by token."""
    matcher = LLMatcher(tokenizer(), judge(kind, constraint, tokenizer()), log_level=0)
    token_ids = tokenizer().tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def refusal(kind: str, constraint: str) -> tuple[str, str]:
    with pytest.raises(Refused) as caught:
        judge(kind, constraint, tokenizer())
    return caught.value.reason, caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "ab",
        'a"b',
        "x\\y",
        "two\nlines",
        "\t",
        "é😀",
        "\x01\x7f\u2028",
        "/",
        '{"a": 1}',
        " a",
        "$^.*",
        '"i',
        "(?i)a",
    ],
)
def test_a_choice_allows_its_texts_exactly(text: str) -> None:
    choice = json.dumps(["zzz", text])

    allowed = [fits("choice", choice, each) for each in ("zzz", text, text + "z", "zz")]

    assert allowed == [True, True, False, False]


@pytest.mark.parametrize(
    ("expression", "text", "is_allowed"),
    [
        ("a/b", "a/b", True),
        ("^abc$", "abc", True),
        ("b", "abc", False),  # the whole text matches, not a part
        ("(?i)abc", "aBc", True),
        (r"\d{3}", "123", True),
        ("é+", "éé", True),
        (".", "\n", False),
        ("(?s).", "\n", True),
        (r"\\", "\\", True),
        ("(a|aa)+b" * 50, "ab" * 50, True),  # no automaton is made of it before it is needed
    ],
)
def test_an_expression_is_of_rusts_syntax_and_matches_the_whole_text(
    expression: str, text: str, is_allowed: bool
) -> None:
    assert fits("regex", expression, text) == is_allowed


@pytest.mark.parametrize(
    ("schema", "text", "is_allowed"),
    [
        ({"type": "object"}, '{"a": [1, "b"], "c": null}', True),
        ({"type": "object"}, '{"a":1}', False),  # white space is as json.dumps writes it
        ({"type": "object"}, "{ }", False),
        ({"type": "object"}, "[]", False),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 5}, "4", True),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 5}, "5", False),
        ({"enum": ["a", 1, None]}, "null", True),
        ({"type": "string", "maxLength": 2}, '"abc"', False),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, '{"ab": 1}', True),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, '{"ab": "x"}', False),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}, "[[], [[]]]", True),
        # names and values of the caller's are no keywords
        ({"properties": {"exclusiveMinimum": True}, "required": ["exclusiveMinimum"]}, '{"exclusiveMinimum": 1}', True),
        ({"const": {"exclusiveMaximum": True}}, '{"exclusiveMaximum": true}', True),
        ({}, "true", True),
        (True, "true", True),
    ],
)
def test_a_schema_allows_its_values_as_json_dumps_writes_them(schema: Any, text: str, is_allowed: bool) -> None:
    """B095: {} and true allow every value."""
    assert fits("json_schema", json.dumps(schema), text) == is_allowed


@pytest.mark.parametrize(
    ("kind", "constraint", "message"),
    [
        ("regex", "[", "unclosed character class"),
        ("regex", "(?P<", "unclosed capture group name"),
        ("regex", "*a", "repetition operator missing expression"),
        ("regex", "\\", "ends with a backslash that escapes nothing"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", "(?=a)b", "look-around"),
        ("grammar", "start: b", 'unknown name: "b"'),
        ("grammar", "start: start", "no text fits it"),
        ("grammar", 'start: <|im_end|> "a"', "no text fits it that the model can write"),
        ("grammar", 'start: "a" <|im_end|> "b"', "begins texts that cannot go on"),
        ("grammar", 'start: "a" <|im_end|>', "an end-of-sequence token, which it ends with by itself"),
        ("json_schema", "not json", "is not JSON: Expecting value"),
        ("json_schema", "null", "must be an object, or true"),
        ("json_schema", "false", "is false, which no value fits"),
        ("json_schema", '{"type": "not-a-type"}', "Invalid type: not-a-type"),
        ("json_schema", '{"enum": []}', "Unsatisfiable schema"),
        ("json_schema", '{"$ref": "#"}', "no text fits it"),
        ("json_schema", '{"type": "string", "pattern": "["}', "unclosed character class"),
        ("json_schema", '{"type": "array", "items":' * 200 + "{}" + "}" * 200, "recursion limit exceeded"),
        ("json_schema", '{"type": "number", "minimum": NaN}', "expected value"),
    ],
)
def test_what_is_no_grammar_is_refused_with_the_parsers_words(kind: str, constraint: str, message: str) -> None:
    """B093, B095: a wrong constraint is the caller's fault, and the caller is told which."""
    reason, told = refusal(kind, constraint)

    assert reason == "INVALID_GRAMMAR"
    assert message in told


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {"type": "string"}}, '["not"]'),
        ({"type": "array", "uniqueItems": True}, '["uniqueItems"]'),
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, '["if", "then"]'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "write anyOf, or alternatives"),
        ({"properties": {"a": {"$ref": "http://example.com/x"}}}, "$ref to another document; put what it refers to"),
        ({"items": {"$ref": "other.json#/x"}}, "$ref to another document"),
        ({"type": "string", "format": "nonsense"}, "Unknown format: nonsense"),
        ({"type": "number", "minimum": 3, "exclusiveMinimum": True}, "must be a number"),
        ({"properties": {"a": {"type": "number", "minimum": 3, "exclusiveMinimum": True}}}, "must be a number"),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "x-guidance"),
        ({"properties": {"a": {}}, "minProperties": 2}, "min/maxProperties only supported"),
    ],
)
def test_a_keyword_that_no_text_can_be_held_to_is_refused_and_never_left_out(schema: Any, message: str) -> None:
    """B100: no text comes out that does not fit the whole schema."""
    reason, told = refusal("json_schema", json.dumps(schema))

    assert reason == "UNSUPPORTED_KEYWORD"
    assert message in told


@pytest.mark.parametrize(
    ("kind", "constraint"),
    [
        ("regex", "(x{1,200}){1,200}"),
        ("regex", "(.{1,1000}){1,1000}z"),
        ("grammar", 'start: e\ne: e "+" e | e "*" e | e e | NUM | \nNUM: /[0-9]+/'),
        ("json_schema", json.dumps({"allOf": [{"type": "string", "pattern": f"^.*{c}.*$"} for c in "abcdefghijkl"]})),
        ("json_schema", "[" * 60_000),
        (
            "json_schema",  # a value of it would never end
            '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": false}',
        ),
    ],
)
def test_what_is_too_complex_is_refused(kind: str, constraint: str) -> None:
    """B097: the limits of the parser end it, also when that only shows some tokens into a text."""
    with pytest.raises(Refused) as caught:
        judge(kind, constraint, embedded_tokenizer())

    assert caught.value.reason == "GRAMMAR_TOO_COMPLEX"


def test_a_schema_that_is_too_complex_gets_advice_on_schemas() -> None:
    optional = {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(300)}}

    reason, told = refusal("json_schema", json.dumps(optional))

    assert reason == "GRAMMAR_TOO_COMPLEX"
    assert "max is 1000; make the schema simpler: fewer optional properties" in told
    assert "left-recursive" not in told


def test_nested_alternatives_are_refused_at_once() -> None:
    """B097: oneOf means exactly one, which a grammar cannot hold a text to unless no two could fit."""
    for depth in range(8, 12):
        schema: dict[str, Any] = {"type": "integer"}
        for _ in range(depth):
            schema = {"oneOf": [schema, {"type": "array", "items": schema}]}

        assert refusal("json_schema", json.dumps(schema))[0] == "UNSUPPORTED_KEYWORD"
