"""The tokens of texts that an output must not have.

Admission turns them into tokens once; the worker then compares tokens alone.
"""

from collections.abc import Sequence

from control_plane.text.model import TextModel
from plugins.errors import FieldViolation
from plugins.types import ModelInfo, SamplingLimits, TokenId

FIELD = "sampling.bad_words"


def bad_word_tokens(
    words: Sequence[str], text: TextModel, model: ModelInfo, limits: SamplingLimits
) -> tuple[tuple[tuple[TokenId, ...], ...], list[FieldViolation]]:
    """Return the ways to write these words as tokens, each once, and what is wrong with the words.

    A word counts as it is and with a space before it, because most tokenizers write it in another way then. A way
    that needs a token beyond the vocabulary is left out: no output can have it.
    """
    forms = [form for word in words for form in (word, word if word.startswith(" ") else f" {word}")]
    encoded = text.encode_pieces(forms)
    ways: dict[tuple[TokenId, ...], None] = {}
    for index in range(len(words)):
        own = [ids for ids in encoded[2 * index : 2 * index + 2] if ids]
        if not own:
            return (), [FieldViolation(FIELD, "EMPTY", f"text at index {index} has no tokens; leave it out")]
        ways |= {ids: None for ids in own if max(ids) < model.vocab_size}
    num_tokens = sum(map(len, ways))
    violations = []
    if len(ways) > limits.max_bad_words:
        description = (
            f"as tokens, with and without a space before them, they are {len(ways)} sequences; "
            f"at most {limits.max_bad_words} are allowed"
        )
        violations.append(FieldViolation(FIELD, "TOO_MANY", description))
    if num_tokens > limits.max_bad_word_tokens:
        description = f"have {num_tokens} tokens together; at most {limits.max_bad_word_tokens} are allowed"
        violations.append(FieldViolation(FIELD, "TOO_LONG", description))
    return tuple(ways), violations
