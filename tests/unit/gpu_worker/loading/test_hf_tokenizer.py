"""A Hugging Face folder's tokenizer, template and special tokens, in the several ways that folders keep them."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gpu_worker.loading.hf_tokenizer import read_tokenizer
from plugins.errors import ModelFileBroken
from tests.unit.gpu_worker.loading.tiny_files import TOKENIZER, TOKENS, write_folder, write_json


def test_the_tokenizer_is_handed_over_as_it_is(tmp_path: Path) -> None:
    bundle = read_tokenizer(write_folder(tmp_path))

    assert bundle.tokenizer_json == (tmp_path / "tokenizer.json").read_bytes()
    assert bundle.chat_template == "{{ messages }}"
    assert (bundle.bos_token, bundle.eos_token, bundle.add_bos) == ("", "<|end|>", False)


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<|end|>", "lstrip": False}, "eos_token": None}
    write_json(write_folder(tmp_path) / "tokenizer_config.json", config)

    bundle = read_tokenizer(tmp_path)

    assert (bundle.bos_token, bundle.eos_token) == ("<|end|>", "")


def test_a_template_in_its_own_file_comes_before_the_one_in_the_configuration(tmp_path: Path) -> None:
    (write_folder(tmp_path) / "chat_template.jinja").write_text("{{ 'é' }}", encoding="utf-8")

    assert read_tokenizer(tmp_path).chat_template == "{{ 'é' }}"


def test_a_template_that_is_not_utf8_is_refused_with_its_name(tmp_path: Path) -> None:
    (write_folder(tmp_path) / "chat_template.jinja").write_bytes(b"ab\xff")

    with pytest.raises(
        ModelFileBroken, match=r"chat_template\.jinja: not UTF-8 \(invalid start byte at byte 2\); fetch"
    ):
        read_tokenizer(tmp_path)


def test_of_several_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write_json(write_folder(tmp_path) / "tokenizer_config.json", {"chat_template": templates})

    assert read_tokenizer(tmp_path).chat_template == "plain"


def test_a_folder_with_nothing_but_a_tokenizer_has_no_template(tmp_path: Path) -> None:
    (write_folder(tmp_path) / "tokenizer_config.json").unlink()

    bundle = read_tokenizer(tmp_path)

    assert (bundle.chat_template, bundle.bos_token, bundle.eos_token, bundle.add_bos) == ("", "", "", False)


@pytest.mark.parametrize(("declared", "add_bos"), [({}, True), ({"add_bos_token": False}, False)])
def test_a_tokenizer_that_puts_bos_in_front_says_so(tmp_path: Path, declared: dict[str, object], add_bos: bool) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
    }
    write_json(write_folder(tmp_path) / "tokenizer.json", {**TOKENIZER, "post_processor": template})
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": "<|end|>", **declared})

    assert read_tokenizer(tmp_path).add_bos is add_bos


def test_a_folder_with_older_files_is_converted_with_transformers(tmp_path: Path) -> None:
    """vocab.json and merges.txt, as GPT-2's folder has them."""
    (write_folder(tmp_path) / "tokenizer.json").unlink()
    write_json(tmp_path / "vocab.json", {token: index for index, token in enumerate(TOKENS)})
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    names = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>", "bos_token": "<|end|>", "unk_token": "<|end|>"}
    write_json(tmp_path / "tokenizer_config.json", names)

    bundle = read_tokenizer(tmp_path)

    tokenizer = Tokenizer.from_buffer(bundle.tokenizer_json)
    assert tokenizer.encode("ab c<|end|>", add_special_tokens=False).ids == [3, 4, 5, 0]
    assert bundle.eos_token == "<|end|>"


def test_a_folder_without_any_tokenizer_is_refused(tmp_path: Path) -> None:
    (write_folder(tmp_path) / "tokenizer.json").unlink()

    with pytest.raises(ModelFileBroken, match=r"has no tokenizer\.json, and transformers cannot make one"):
        read_tokenizer(tmp_path)


def test_a_damaged_tokenizer_is_refused_with_its_name(tmp_path: Path) -> None:
    path = write_folder(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps(TOKENIZER)[:200])

    with pytest.raises(ModelFileBroken, match=r"tokenizer\.json: not a tokenizer: .*; fetch it again"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": 2}, "eos_token is 2; it must be text"),
        ({"chat_template": 5}, "chat_template is neither text nor a list of named texts"),
    ],
)
def test_a_configuration_of_the_wrong_kind_is_refused(tmp_path: Path, config: dict[str, object], message: str) -> None:
    write_json(write_folder(tmp_path) / "tokenizer_config.json", config)

    with pytest.raises(ModelFileBroken, match=message):
        read_tokenizer(tmp_path)
