"""Three kinds of vocabulary for streams of random tokens, and texts that are hard for each.

The oracle decodes with `tokenizers` itself, all tokens at once.
"""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

from control_plane.text.model import TextModel
from gpu_worker.loading.embedded import embedded_model
from gpu_worker.loading.gguf_file import read_gguf
from gpu_worker.loading.gguf_tokenizer import tokenizer_bundle
from plugins.types import TokenId, TokenizerBundle
from tests.unit.control_plane.text import byte_level

FAMILY, FLAG, HEART = "\U0001f469\u200d\U0001f467", "\U0001f1eb\U0001f1f7", "\u2764\ufe0f"
EMOJI = ("\U0001f600", FAMILY, FLAG, HEART, "\U0001f44d\U0001f3fd", "1\ufe0f\u20e3")
CJK = ("中", "文", "漢", "字", "日", "本", "語", "한", "국", "어", "の", "。", "𠮷")
WORDS = (
    " Paris",
    " is",
    " the",
    "hello",
    "STOP",
    "User:",
    "\n",
    "\n\n",
    "  ",
    " ",
    "ďábel",
    "a",
    "b",
    "ab",
    "</s>",
    "é",
    "\x00",
)
PARTS = (*EMOJI, *CJK, *WORDS)


@dataclass(frozen=True)
class Vocabulary:
    """One model's tokenizer, twice: as it is served, and for the oracle."""

    model: TextModel
    peer: Tokenizer
    draw: Callable[[random.Random], list[TokenId]]  # random tokens that may make no sense
    spell: Callable[[str], list[TokenId]]  # the tokens of a text
    stop_token_ids: tuple[TokenId, ...]  # of which one may end an output

    def decode(self, token_ids: Sequence[TokenId], skip_special_tokens: bool = True) -> str:
        """All tokens at once, by the library."""
        return self.peer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


@functools.cache
def embedded() -> Vocabulary:
    """SmolLM2's: byte pairs, with many tokens that are parts of characters."""
    bundle = tokenizer_bundle(read_gguf(embedded_model()))
    model, peer = TextModel.from_bundle(bundle), Tokenizer.from_buffer(bundle.tokenizer_json)
    fragments = [TokenId(index) for index in range(49152) if "\ufffd" in peer.decode([index], False)]

    def draw(rng: random.Random) -> list[TokenId]:
        token_ids: list[TokenId] = []
        for _ in range(rng.randint(1, 8)):
            token_ids += rng.choice(
                (
                    model.encode(rng.choice(PARTS)),
                    model.encode("".join(rng.choices(PARTS, k=3))),
                    (TokenId(rng.randrange(49152)),),
                    (rng.choice(fragments),),
                )
            )
        return token_ids

    ends = (TokenId(2), *model.encode("hello"), *model.encode(" Paris"))
    return Vocabulary(model, peer, draw, lambda text: list(model.encode(text)), ends)


@functools.cache
def small() -> Vocabulary:
    """Bytes, and a few words: every character beyond ASCII is of several tokens."""
    model = TextModel.from_bundle(byte_level.bundle())

    def draw(rng: random.Random) -> list[TokenId]:
        token_ids: list[TokenId] = []
        for _ in range(rng.randint(1, 8)):
            drawn = TokenId(rng.randrange(byte_level.VOCAB_SIZE))
            token_ids += rng.choice([(drawn,), model.encode(rng.choice(PARTS))])
        return token_ids

    ends = (TokenId(2), byte_level.merged("hello"), byte_level.byte(0x20))
    return Vocabulary(model, byte_level.tokenizer(), draw, lambda text: list(model.encode(text)), ends)


@functools.cache
def byte_fallback() -> Vocabulary:
    """As sentencepiece makes them: words with a mark for their space, bytes for what has no token, no first space.

    Bytes that are no character are left out: such a decoder reads a run of bytes as a whole, and one wrong byte takes
    back characters that were given out before it came.
    """
    texts = ["<unk>", "<s>", "</s>", "▁", "▁Paris", "▁is", "▁the", "hello", "ST", "OP", "a", "b", "ab", "中", "\n", ":"]
    vocabulary = {f"<0x{value:02X}>": len(texts) + value for value in range(256)}
    vocabulary |= {text: index for index, text in enumerate(texts)}
    peer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    peer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts[:3]])
    peer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    model = TextModel.from_bundle(
        TokenizerBundle(
            tokenizer_json=peer.to_str().encode(), chat_template="", bos_token="<s>", eos_token="</s>", add_bos=False
        )
    )

    def spell(text: str) -> list[TokenId]:
        text, token_ids = " " + text, []
        while text:
            marked = text.replace(" ", "▁")
            fitting = [each for each in texts[3:] if marked.startswith(each)]
            if fitting:
                longest = max(fitting, key=len)
                token_ids.append(TokenId(vocabulary[longest]))
                text = text[len(longest) :]
            else:
                token_ids += [TokenId(vocabulary[f"<0x{value:02X}>"]) for value in text[0].encode()]
                text = text[1:]
        return token_ids

    def draw(rng: random.Random) -> list[TokenId]:
        token_ids = spell("".join(rng.choices(PARTS, k=rng.randint(1, 8))))
        if rng.random() < 0.3:
            token_ids += [TokenId(2), *spell(rng.choice(PARTS))]
        return token_ids

    ends = (TokenId(2), TokenId(vocabulary["hello"]), TokenId(vocabulary["\n"]))
    return Vocabulary(model, peer, draw, spell, ends)


VOCABULARIES = {"embedded": embedded, "small": small, "byte fallback": byte_fallback}
