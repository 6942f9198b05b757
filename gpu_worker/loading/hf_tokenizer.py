"""Reads the tokenizer of a Hugging Face folder, with its chat template and its special tokens."""

from pathlib import Path

from tokenizers import Tokenizer

from gpu_worker.loading.json_file import JsonFile, read_json
from plugins.errors import ModelFileBroken
from plugins.types import TokenizerBundle


def read_tokenizer(folder: Path) -> TokenizerBundle:
    """Return a folder's tokenizer. One without tokenizer.json is converted with transformers.

    Raises: ModelFileBroken: a file is damaged, or there is nothing that transformers can convert.
    """
    path = folder / "tokenizer.json"
    text = path.read_bytes() if path.is_file() else _convert(folder)
    try:
        tokenizer = Tokenizer.from_buffer(text)
    except Exception as error:  # the tokenizers package raises bare Exception for whatever it cannot parse
        raise ModelFileBroken(f"{path}: not a tokenizer: {error}; fetch it again") from error
    config = _optional(folder / "tokenizer_config.json")
    bos_token = _special_token(config, "bos_token")
    return TokenizerBundle(
        tokenizer_json=text,
        chat_template=_chat_template(folder, config),
        bos_token=bos_token,
        eos_token=_special_token(config, "eos_token"),
        add_bos=config.get("add_bos_token", bool, _starts_with(tokenizer, bos_token)),
    )


def _convert(folder: Path) -> bytes:
    """Build a tokenizer.json from older files, such as vocab.json with merges.txt, or tokenizer.model."""
    from transformers import AutoTokenizer  # imported here: it takes seconds, and most folders do not need it

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return str(tokenizer.backend_tokenizer.to_str()).encode()
    except Exception as error:  # transformers raises whatever the tokenizer's own converter meets
        raise ModelFileBroken(
            f"{folder}: has no tokenizer.json, and transformers cannot make one from what there is "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); fetch the model again"
        ) from error


def _optional(path: Path) -> JsonFile:
    return read_json(path) if path.is_file() else JsonFile(path, {})


def _special_token(config: JsonFile, key: str) -> str:
    """Return a token's text; newer files write it plainly, older ones as an object with its content."""
    value = config.values.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ModelFileBroken(f"{config.path}: {key} is {value!r}; it must be text")
    return value


def _chat_template(folder: Path, config: JsonFile) -> str:
    """Return the template in its own file, else in the configuration: one text, or the default one of several."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelFileBroken(
                f"{path}: not UTF-8 ({error.reason} at byte {error.start}); fetch it again"
            ) from error
    value = config.values.get("chat_template")
    if isinstance(value, list):
        named = [item for item in value if isinstance(item, dict)]
        value = next((item.get("template") for item in named if item.get("name") == "default"), None)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ModelFileBroken(f"{config.path}: chat_template is neither text nor a list of named texts")
    return value


def _starts_with(tokenizer: Tokenizer, bos_token: str) -> bool:
    """Say whether the tokenizer itself puts the token in front of a text."""
    return (
        bos_token != ""
        and tokenizer.encode("a").tokens[:1] == [bos_token]
        and tokenizer.encode("a", add_special_tokens=False).tokens[:1] != [bos_token]
    )
