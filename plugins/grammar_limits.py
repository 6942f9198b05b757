"""How complex a grammar may be, wherever it is read: the arguments of llguidance's LLParserLimits.

Both planes read a grammar under the same limits, so that a worker does not refuse what admission took. How long
reading may take is admission's business.
"""

from typing import Final, TypedDict


class ParserLimits(TypedDict):
    """Those of llguidance's limits that are not left as they are."""

    max_items_in_row: int  # ways to read the text so far that are open at once
    step_max_items: int  # such ways that are looked at for one token
    max_lexer_states: int  # each takes 1 to 2 kB


# Found with grammars made to be slow. With llguidance's own limits one token of `s: s s | s s s | "a" | "b" | ""` may
# take over 20 s, with these 0.3 s. An object may have 249 optional properties.
PARSER_LIMITS: Final = ParserLimits(max_items_in_row=1_000, step_max_items=10_000, max_lexer_states=50_000)
