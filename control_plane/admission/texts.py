"""Texts that a request lists, such as those that end its output.

What a text means is the business of whoever looks for it; its tokens are those of `bad_words.py`.
"""

from control_plane.admission.tokens import is_list
from plugins.errors import FieldViolation
from plugins.sampling_ranges import told


def text_list_violations(field: str, texts: object, max_texts: int, max_characters: int) -> list[FieldViolation]:
    """Name the first text that is empty, too long or none. The number of texts is compared first."""
    if not is_list(texts):
        return [FieldViolation(field, "WRONG_TYPE", f"is {told(texts)}; must be a list of texts")]
    if len(texts) > max_texts:
        return [FieldViolation(field, "TOO_MANY", f"has {len(texts)} texts; at most {max_texts} are allowed")]
    for index, text in enumerate(texts):
        fault = text_fault(text, max_characters)
        if fault is not None:
            return [FieldViolation(field, fault[0], f"text at index {index} {fault[1]}")]
    return []


def text_fault(text: object, max_characters: int) -> tuple[str, str] | None:
    """Tell what is wrong with one text, as reason and description; None: nothing is."""
    if not isinstance(text, str):
        return "WRONG_TYPE", f"is {told(text)}; must be a text"
    if not text:
        return "EMPTY", "is empty; leave it out"
    if len(text) > max_characters:
        return "TOO_LONG", f"has {len(text)} characters; at most {max_characters} are allowed"
    if not is_unicode(text):
        return "NOT_UNICODE", "is not valid Unicode"
    return None


def is_unicode(text: str) -> bool:
    """True if the text can be written as UTF-8: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
