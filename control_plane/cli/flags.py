"""Makes command-line flags of the fields of configuration sections.

Every key has the flag `--section.key`. It is also `--key` where it is the command's only key of that name, or
belongs to the first of the command's primary sections that has one. What values mean is the sections' business.
"""

import dataclasses
import inspect
import io
import tokenize
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from plugins.errors import InvalidConfig

GROUPS = {
    "worker": "Model and worker",
    "server": "Server",
    "admission": "Requests and scheduling",
    "scheduler": "Requests and scheduling",
    "workers": "Link to the worker",
    "plugins": "Plug-ins",
    "log": "Logs and metrics",
    "metrics": "Logs and metrics",
}
SHOWN_IN_FULL = ("workers", "plugins", "log", "metrics")  # --log.level says more than --level, which is understood too


@dataclass(frozen=True, slots=True)
class Flag:
    """One key as a flag."""

    key: str  # dotted, such as server.port
    name: str  # the spelling that help shows and the parser knows
    short: str | None  # --key, if that means this one
    kind: Any  # the type of its values
    default: object
    help: str  # the comment beside the field

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    @property
    def parameter(self) -> str:
        """A Python name for it."""
        return self.key.replace(".", "__")

    @property
    def full_name(self) -> str:
        """The spelling that every command understands."""
        return "--" + self.key.replace("_", "-")


def make_flags(sections: Mapping[str, type[Any]], primary: Sequence[str]) -> tuple[Flag, ...]:
    """Make a flag of each field of these sections."""
    owners: dict[str, list[str]] = {}  # key -> its sections
    for section, kind in sections.items():
        for each in dataclasses.fields(kind):
            owners.setdefault(each.name, []).append(section)
    flags: list[Flag] = []
    for section, kind in sections.items():
        hints = get_type_hints(kind)
        comments = field_comments(kind)
        for each in dataclasses.fields(kind):
            first = next((name for name in primary if name in owners[each.name]), None)
            is_short = section == first or owners[each.name] == [section]
            short = "--" + each.name.replace("_", "-") if is_short else None
            full = f"--{section}.{each.name}".replace("_", "-")
            name = full if short is None or section in SHOWN_IN_FULL else short
            comment = comments.get(each.name, "")
            flags.append(Flag(f"{section}.{each.name}", name, short, hints[each.name], each.default, comment))
    return tuple(flags)


def field_comments(kind: type[Any]) -> dict[str, str]:
    """Read the comment that stands beside each field of a dataclass; empty where there is no source to read."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return {}
    names = {each.name for each in dataclasses.fields(kind)}
    comments: dict[str, str] = {}
    current = ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.cleandoc(source)).readline):
        if token.type == tokenize.NAME and token.line.lstrip().startswith(f"{token.string}:") and token.string in names:
            current = token.string
        elif token.type == tokenize.COMMENT and current:
            comments.setdefault(current, token.string.lstrip("# "))
        elif token.type == tokenize.NEWLINE:
            current = ""
    return comments


def signature(flags: Sequence[Flag], shown: Collection[str], positional: str | None) -> inspect.Signature:
    """Return the signature of a command with these flags; its help shows those whose keys are in `shown`.

    `positional` is the key that may be given without its flag, such as worker.model.
    """
    groups = {title: Group(title, sort_key=index) for index, title in enumerate(dict.fromkeys(GROUPS.values()))}
    parameters = []
    for flag in sorted(flags, key=lambda flag: flag.key != positional):
        title = GROUPS.get(flag.section, flag.section.capitalize())
        about = Parameter(
            name=flag.name,
            negative=negative(flag.name) if flag.kind is bool else (),
            group=groups.setdefault(title, Group(title)),
            help=flag.help + ("" if flag.default is None else f" [{flag.default}]"),
            show=flag.key in shown,
            show_default=False,
        )
        parameters.append(
            inspect.Parameter(
                flag.parameter,
                inspect.Parameter.POSITIONAL_OR_KEYWORD if flag.key == positional else inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[flag.kind | None, about],
            )
        )
    return inspect.Signature(parameters)


def negative(name: str) -> str:
    """Spell the flag that turns a boolean one off."""
    return "--no-" + name.removeprefix("--")


def canonical(argv: Iterable[str], flags: Sequence[Flag]) -> list[str]:
    """Rewrite every accepted spelling of a flag to the one that its command knows.

    Raises: InvalidConfig: several sections have the key, and none of them is the primary one.
    """
    spellings: dict[str, str] = {}
    for flag in flags:
        for spelling in (flag.full_name, flag.short or flag.full_name):
            spellings[spelling] = flag.name
            if flag.kind is bool:
                spellings[negative(spelling)] = negative(flag.name)
    result: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--":
            return [*result, word, *words]
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
            meant = [flag.full_name for flag in flags if flag.full_name.endswith("." + name.removeprefix("--"))]
            if name not in spellings and len(meant) > 1:
                raise InvalidConfig(f"{name} is a key of several sections; say {' or '.join(meant)}")
            word = spellings.get(name, name) + equals + value
        result.append(word)
    return result


def to_arguments(values: Mapping[str, object]) -> list[str]:
    """Write dotted keys and their values as arguments that any command with those sections understands."""
    return [
        f"--{key.replace('_', '-')}={each}"
        for key, value in values.items()
        for each in (value if isinstance(value, tuple | list) else (value,))
    ]
