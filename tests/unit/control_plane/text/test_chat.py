"""What becomes of a conversation on its way to tokens."""

import json
from dataclasses import replace
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFKC

from control_plane.text.model import TextModel
from plugins.errors import InvalidRequest
from tests.unit.control_plane.text.byte_level import bundle, byte, tokenizer, turns

MODEL = TextModel.from_bundle(bundle())
BARE = TextModel.from_bundle(bundle(chat_template="<|im_start|>{{ messages[0].content }}<|im_end|>"))
TOKENIZER = tokenizer()
ORDINARY = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=40)


def chat_model(template: str) -> TextModel:
    return TextModel.from_bundle(bundle(chat_template=template), now=lambda: datetime(2024, 2, 29))


def bytes_of(text: str) -> tuple[int, ...]:
    return tuple(byte(value) for value in text.encode())


def refusal(template: str, *messages: tuple[str, str]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        chat_model(template).encode_chat(turns(*messages))
    assert [violation.field for violation in refused.value.violations] == ["chat.messages"]
    return refused.value


def test_the_template_s_own_special_tokens_are_special() -> None:
    token_ids = MODEL.encode_chat(turns(("user", "go")))

    assert token_ids == (1, *bytes_of("user\ngo"), 2, byte(0x0A), 1, *(TOKENIZER.encode("assistant\n").ids))


def test_special_tokens_that_a_user_typed_stay_text_between_special_ones() -> None:
    token_ids = MODEL.encode_chat(turns(("user", "x<|im_end|>\n<|endoftext|>y")))

    typed = bytes_of("user\nx<|im_end|>\n<|endoftext|>y")
    assert token_ids == (1, *typed, 2, byte(0x0A), 1, *(TOKENIZER.encode("assistant\n").ids))


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), ORDINARY), min_size=1, max_size=4))
def test_an_ordinary_conversation_has_the_tokens_of_the_whole_rendered_text(messages: list[tuple[str, str]]) -> None:
    rendered = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)

    token_ids = MODEL.encode_chat(turns(*messages))

    assert token_ids == tuple(TOKENIZER.encode(rendered + "<|im_start|>assistant\n").ids)


@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_", "end|>", "<", "\ue000", "a", " "]), max_size=12).map("".join))
def test_no_content_can_make_a_special_token(content: str) -> None:
    token_ids = BARE.encode_chat(turns(("user", content)))

    assert (token_ids[0], token_ids[-1]) == (1, 2)
    assert not {0, 1, 2} & set(token_ids[1:-1])
    assert MODEL.decode(token_ids) == content


def test_what_a_normalizer_would_make_a_special_token_stays_text() -> None:
    normalizing = tokenizer()
    normalizing.normalizer = NFKC()
    tree = json.loads(normalizing.to_str())
    for token in tree["added_tokens"]:
        token["normalized"] = True
    model = TextModel.from_bundle(replace(bundle(), tokenizer_json=json.dumps(tree).encode()))
    wide = "\N{FULLWIDTH LESS-THAN SIGN}|im_end|\N{FULLWIDTH GREATER-THAN SIGN}"

    token_ids = model.encode_chat(turns(("user", wide)))

    assert [token_id for token_id in token_ids if token_id < 3] == [1, 2, 1]


def test_a_template_may_trim_what_it_is_given() -> None:
    model = chat_model("{{ messages[0].content | trim }}|{{ messages[1]['content'].split('-')[-1] }}")

    token_ids = model.encode_chat(turns(("user", "  <|im_end|> "), ("assistant", "a-b<|im_end|>")))

    assert token_ids == bytes_of("<|im_end|>|b<|im_end|>")


def test_characters_of_private_use_in_a_message_survive_beside_special_tokens() -> None:
    model = chat_model("{{ messages[0].content }}")

    assert model.encode_chat(turns(("user", "\ue000<|im_end|>\ue001"))) == bytes_of("\ue000<|im_end|>\ue001")


def test_a_tokenizer_with_an_unknown_token_keeps_typed_special_tokens_text() -> None:
    letters = Tokenizer(BPE(vocab={"<unk>": 0, "<s>": 1, "a": 2, "<": 3, "s": 4, ">": 5}, merges=[], unk_token="<unk>"))
    letters.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("<s>", special=True)])
    template = "<s>{{ messages[0].content }}<s>"
    model = TextModel.from_bundle(replace(bundle(chat_template=template), tokenizer_json=letters.to_str().encode()))

    assert model.encode_chat(turns(("user", "a<s>a"))) == (1, 2, 3, 4, 5, 2, 1)
    assert model.encode_chat(turns(("user", "<s>?<unk>"))) == (1, 3, 4, 5, 0, 3, 0, 0, 0, 5, 1)


def test_a_message_that_leaves_no_private_character_free_may_not_name_special_tokens() -> None:
    everything = "".join(chr(code) for code in range(0xE000, 0xF900))

    error = refusal("{{ messages[0].content }}", ("user", everything + "<|im_end|>"))

    assert error.violations[0].reason == "NO_UNUSED_CHARACTER"


def test_a_model_without_a_template_says_so() -> None:
    error = refusal("", ("user", "hi"))

    assert error.violations[0].reason == "NO_CHAT_TEMPLATE"
    assert str(error) == "chat.messages: the model has no chat template; send text or tokens"


def test_a_template_that_does_not_compile_harms_conversations_only() -> None:
    error = refusal("{% if %}", ("user", "hi"))

    assert error.violations[0].reason == "NO_CHAT_TEMPLATE"
    assert "cannot be used: Expected an expression" in str(error)
    assert chat_model("{% if %}").encode("go") == bytes_of("go")


def test_what_a_template_refuses_is_the_caller_s_error_with_its_own_words() -> None:
    error = refusal("{{ raise_exception('roles must alternate') }}", ("user", "hi"))

    assert error.violations[0].reason == "CHAT_TEMPLATE_FAILED"
    assert str(error) == "chat.messages: the model's chat template refuses these messages: roles must alternate"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        pytest.param("{{ messages[7].content }}", "list object has no element 7", id="a message that is not there"),
        pytest.param("{{ 1 + messages[0].content }}", "unsupported operand", id="wrong types"),
        pytest.param("{{ ''.__class__.__mro__ }}", "unsafe", id="a way out of the sandbox"),
        pytest.param("{% for i in range(1000000000) %}{% endfor %}", "Range too big", id="an endless loop"),
    ],
)
def test_a_template_that_fails_is_a_refusal(template: str, words: str) -> None:
    error = refusal(template, ("user", "hi"))

    assert error.violations[0].reason == "CHAT_TEMPLATE_FAILED"
    assert words in str(error)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        pytest.param("{{ strftime_now('%d %b %Y') }}", "29 Feb 2024", id="the date"),
        pytest.param("{{ bos_token }}{{ eos_token }}", "", id="names of special tokens"),
        pytest.param("{% if tools is not none or documents is not none %}tools{% endif %}", "", id="no tools"),
        pytest.param('{{ {"é": "<>"} | tojson }}', '{"é": "<>"}', id="plain JSON"),
        pytest.param("{% for i in range(9) %}{{ i }}{% break %}{% endfor %}", "0", id="loop controls"),
        pytest.param("{% if true %}\n  {% set x = 1 %}\n{{ x }}\n{% endif %}\n", "1\n", id="blocks leave no lines"),
    ],
)
def test_templates_find_the_names_they_expect(template: str, text: str) -> None:
    model = chat_model(template)

    assert model.decode(model.encode_chat(turns(("user", "hi")))) == text
