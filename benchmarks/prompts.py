"""Prompts of an exact number of tokens, the same for the same seed, made with the server's own tokenizer.

Random words, so that no cache can answer for another prompt; what the model says to them is nobody's business.
"""

import random
from collections.abc import Awaitable, Callable, Sequence

Tokenize = Callable[[str], Awaitable[Sequence[int]]]  # text to token ids, as the server would

# Common enough to be one token each, with their leading space, in the vocabularies of today's models.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education foot boy age policy music market sense nation plan college "
    "interest death experience effect use class control field development role effort rate heart drug show leader "
    "light voice wife police mind price report decision son view relationship town road arm difference value building "
    "action season society tax director position player record paper space ground form event matter center couple "
    "site project activity star table need court oil situation cost industry figure street image phone data picture "
    "practice piece land product doctor wall patient worker news test movie north love support technology"
)
CANDIDATES = tuple(_WORDS.split())


class Prompts:
    """The prompts of one run, by index. Immutable; the same arguments give the same texts."""

    def __init__(self, words: Sequence[str], num_extra: int, num_prefix: int, num_distinct: int, seed: int) -> None:
        """`words` are one token each with a leading space; the tokenizer adds `num_extra` tokens to every text."""
        self._words = words
        self._seed = seed
        self._num_distinct = num_distinct - (0 if num_prefix else num_extra)
        self._prefix = self._draw("prefix", num_prefix - num_extra if num_prefix else 0)

    def __getitem__(self, index: int) -> str:
        return self._prefix + self._draw(str(index), self._num_distinct)

    def _draw(self, key: str, num_words: int) -> str:
        chosen = random.Random(f"{self._seed}/{key}").choices(self._words, k=num_words)
        return "".join(f" {word}" for word in chosen)


class WordList:
    """The words of `CANDIDATES` that are one token each, and how many tokens the tokenizer adds to a text."""

    def __init__(self, words: Sequence[str], num_extra: int) -> None:
        self.words = tuple(words)
        self.num_extra = num_extra

    @classmethod
    async def measure(cls, tokenize: Tokenize) -> "WordList":
        """Ask the tokenizer. Raises: ValueError: hardly a word is one token, so no exact length can be made."""
        num_once, num_twice = len(await tokenize(" time")), len(await tokenize(" time time"))
        num_extra = 2 * num_once - num_twice
        everything = "".join(f" {word}" for word in CANDIDATES)
        if len(await tokenize(everything)) == len(CANDIDATES) + num_extra:
            return cls(CANDIDATES, num_extra)
        words = [word for word in CANDIDATES if len(await tokenize(f" {word}")) == 1 + num_extra]
        if len(words) < 2:
            raise ValueError(
                f"{len(words)} of {len(CANDIDATES)} common words are one token of the served model's tokenizer; "
                "prompts of an exact length need at least 2: benchmark a model with a real vocabulary"
            )
        return cls(words, num_extra)

    def prompts(self, num_prefix: int, num_distinct: int, seed: int) -> Prompts:
        """Make the prompts of one run: `num_prefix` tokens in common, then `num_distinct` of their own."""
        return Prompts(self.words, self.num_extra, num_prefix, num_distinct, seed)
