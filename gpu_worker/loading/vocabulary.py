"""Which tokens of a model can be served: those that its tokenizer knows. The others fill the matrix up."""

from tokenizers import Tokenizer

from plugins.errors import ModelFileBroken
from plugins.types import TokenizerBundle


def served_vocab_size(vocab_size: int, bundle: TokenizerBundle) -> int:
    """Return one past the highest token of the model that its tokenizer can turn into text, added ones included.

    Raises: ModelFileBroken: the tokenizer cannot be read, or knows no token.
    """
    try:
        known = Tokenizer.from_buffer(bundle.tokenizer_json).get_vocab(with_added_tokens=True).values()
    except Exception as error:  # the tokenizers package raises bare Exception for whatever it cannot parse
        raise ModelFileBroken(f"the model's tokenizer cannot be read: {error}; fetch the model again") from error
    if not known:
        raise ModelFileBroken("the model's tokenizer knows no token; fetch the model again")
    return min(vocab_size, max(known) + 1)
