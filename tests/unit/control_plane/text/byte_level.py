"""A byte-level tokenizer small enough to know by heart, for the tests of text, admission and API.

Ids: 0, 1, 2 are <|endoftext|>, <|im_start|>, <|im_end|>; 3 + b is the byte b; then `MERGED`, in their order.
"""

import functools

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from plugins.types import TokenId, TokenizerBundle

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGED = ("he", "ll", "hell", "hello", " P", "ar", "is", " Par", " Paris", "\ufffd")
VOCAB_SIZE = len(SPECIAL) + 256 + len(MERGED) + 1  # one more: the first two bytes of U+FFFD
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte(value: int) -> TokenId:
    """The token of one byte."""
    return TokenId(len(SPECIAL) + value)


def merged(text: str) -> TokenId:
    """The token of one of MERGED."""
    return TokenId(_vocabulary()[_letters(text.encode())])


def tokenizer() -> Tokenizer:
    """The tokenizer itself."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), (" ", "P"), ("a", "r"), ("i", "s"), (" P", "ar"),
              (" Par", "is")]  # fmt: skip
    pairs = [(_letters(left.encode()), _letters(right.encode())) for left, right in merges]
    pairs += [(_letters(b"\xef"), _letters(b"\xbf")), (_letters(b"\xef\xbf"), _letters(b"\xbd"))]
    made = Tokenizer(BPE(vocab=_vocabulary(), merges=pairs))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevelDecoder()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return made


def turns(*messages: tuple[str, str]) -> list[dict[str, str]]:
    """Messages as templates expect them, from pairs of role and content."""
    return [{"role": role, "content": content} for role, content in messages]


def bundle(
    chat_template: str = CHAT_TEMPLATE, bos_token: str = "<|im_start|>", add_bos: bool = False
) -> TokenizerBundle:
    """What a worker would hand over."""
    return TokenizerBundle(
        tokenizer_json=_tokenizer_json(),
        chat_template=chat_template,
        bos_token=bos_token,
        eos_token="<|im_end|>",
        add_bos=add_bos,
    )


@functools.cache
def _tokenizer_json() -> bytes:
    return tokenizer().to_str().encode()


def _letters(data: bytes) -> str:
    """Bytes in the alphabet that byte-level vocabularies are written in."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return "".join(chr(value) if value in printable else chr(256 + others.index(value)) for value in data)


def _vocabulary() -> dict[str, int]:
    parts = [*SPECIAL, *(_letters(bytes([value])) for value in range(256))]
    parts += [_letters(text.encode()) for text in MERGED]
    parts.append(_letters(b"\xef\xbf"))
    return {part: index for index, part in enumerate(parts)}
