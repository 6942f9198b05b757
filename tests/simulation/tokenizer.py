"""A tokenizer for the fake model: every id of its vocabulary has a text, many of them a part of a character only.

Only its decoder matters: simulated prompts come as tokens.
"""

import functools

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from control_plane.text.model import TextModel
from plugins.types import TokenizerBundle
from tests.fakes import VOCAB_SIZE

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@functools.cache
def bundle() -> TokenizerBundle:
    """What every simulated worker hands over."""
    letters = sorted(ByteLevel.alphabet())
    pairs = [left + right for left in letters for right in letters]
    vocabulary = [*SPECIAL, *letters, *pairs][:VOCAB_SIZE]
    made = Tokenizer(BPE(vocab={text: index for index, text in enumerate(vocabulary)}, merges=[]))
    made.decoder = ByteLevelDecoder()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return TokenizerBundle(
        tokenizer_json=made.to_str().encode(), chat_template="", bos_token="", eos_token=SPECIAL[2], add_bos=False
    )


@functools.cache
def text_model() -> TextModel:
    """The text side of the model, parsed once in a process."""
    return TextModel.from_bundle(bundle())
