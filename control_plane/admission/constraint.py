"""What a request asks the text of its output to look like: that it is one thing, and that it is there.

Whether a schema, an expression or a grammar can be carried out is the business of the grammars' compiler.
"""

from typing import Final

from control_plane.admission.texts import is_unicode, text_fault
from control_plane.admission.tokens import is_list
from plugins.errors import FieldViolation
from plugins.sampling_ranges import told
from plugins.types import StructuredOutput

FIELD: Final = "sampling.structured_output"
MAX_CHOICES: Final = 1000
MAX_CHOICE_CHARACTERS: Final = 1024
_TEXTS: Final = ("json_schema", "regex", "grammar")


def constraint_violations(output: object) -> list[FieldViolation]:
    """Tell what is wrong with the form of a constraint; its contents are not read."""
    if output is None:
        return []
    if not isinstance(output, StructuredOutput):
        description = f"is {told(output)}; must be a StructuredOutput, or left out"
        return [FieldViolation(FIELD, "WRONG_TYPE", description)]
    wrong_types = _type_violations(output)
    if wrong_types:
        return wrong_types
    given = [name for name in _TEXTS if getattr(output, name) is not None]
    given += ["json_object"] * output.json_object + ["choice"] * bool(output.choice)
    if len(given) != 1:
        description = f"sets {', '.join(given) or 'none'}; set exactly one of json_schema, json_object, regex, choice, "
        return [FieldViolation(FIELD, "REQUIRED", description + "grammar")]
    return _choice_violations(output.choice) if given == ["choice"] else _text_violations(given[0], output)


def _type_violations(output: StructuredOutput) -> list[FieldViolation]:
    found = [
        FieldViolation(f"{FIELD}.{name}", "WRONG_TYPE", f"is {told(getattr(output, name))}; must be a text")
        for name in _TEXTS
        if not isinstance(getattr(output, name), str | None)
    ]
    if not isinstance(output.json_object, bool):
        description = f"is {told(output.json_object)}; must be true, or left out"
        found.append(FieldViolation(f"{FIELD}.json_object", "WRONG_TYPE", description))
    if not is_list(output.choice):
        found.append(FieldViolation(f"{FIELD}.choice", "WRONG_TYPE", f"is {told(output.choice)}; must be texts"))
    return found


def _choice_violations(texts: tuple[str, ...]) -> list[FieldViolation]:
    field = f"{FIELD}.choice"
    if len(texts) > MAX_CHOICES:
        return [FieldViolation(field, "TOO_MANY", f"has {len(texts)} texts; at most {MAX_CHOICES} are allowed")]
    for index, text in enumerate(texts):
        fault = text_fault(text, MAX_CHOICE_CHARACTERS)
        if fault is not None:
            return [FieldViolation(field, fault[0], f"text at index {index} {fault[1]}")]
    return []


def _text_violations(name: str, output: StructuredOutput) -> list[FieldViolation]:
    text = getattr(output, name)
    if text == "":
        return [FieldViolation(f"{FIELD}.{name}", "EMPTY", "is empty; leave it out")]
    if isinstance(text, str) and not is_unicode(text):
        return [FieldViolation(f"{FIELD}.{name}", "NOT_UNICODE", "is not valid Unicode")]
    return []
