"""Finds the logits processors of a process: those of entry points, then those that its configuration names.

Both planes load the same list in the same way. Builds none of them: that is the worker's business.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Final

from plugins.classes import distribution_of, entry_point_names, find_class
from plugins.errors import InvalidConfig
from plugins.logits import LogitsProcessor
from plugins.types import ProcessorInfo

GROUP: Final = "dihedral.logits_processors"
KEY: Final = "plugins.logits_processors"
CONFIG_KEY: Final = "plugins.logits_processor_config"
HOOK: Final = "plugins.logits.LogitsProcessor"
REMEDY: Final = "correct it as docs/logits_processors.md describes, or leave it out"
BUILTIN_PROCESSORS: Final = {
    "ngram_repetition": "plugins.builtin.ngram:NgramRepetitionBreaker",
    "thinking_budget": "plugins.builtin.thinking:ThinkingBudget",
    "watermark": "plugins.builtin.watermark:Watermark",
}
MAX_MESSAGE_CHARACTERS: Final = 500  # of what a processor says when it raises
_CALLS: Final = {  # how many arguments each method is called with, besides the instance
    "add_request": 2,
    "apply_staged_writes": 0,
    "apply": 2,
}


@dataclass(frozen=True, slots=True)
class LoadedProcessor:
    """A class that keeps the form of the hook, and what it is called."""

    cls: type[LogitsProcessor]
    info: ProcessorInfo
    section: Mapping[str, Any] = field(default_factory=dict)  # its part of the configuration


def load_processors(
    names: Sequence[str | type[Any]] = (), config: str | Mapping[str, Any] = ""
) -> tuple[LoadedProcessor, ...]:
    """Load the processors of entry points, sorted by name, then these: names, places or classes.

    A class that comes twice is two processors. `config` is a JSON object, or a mapping, of sections by name.
    Raises: InvalidConfig: one of them cannot be loaded or does not keep the form of the hook, or a section is nobody's.
    """
    given = [*entry_point_names(GROUP), *names]
    sections = _sections(config)
    loaded = [load_processor(each) for each in given]
    known = sorted({each.info.name for each in loaded})
    for name in sections:
        if name not in known:
            raise InvalidConfig(
                f"{CONFIG_KEY} has a section {name!r}; loaded processors: {', '.join(known) or '<none>'}"
            )
    return tuple(LoadedProcessor(each.cls, each.info, sections.get(each.info.name, {})) for each in loaded)


def load_processor(given: str | type[Any]) -> LoadedProcessor:
    """Load one processor: the name of an entry point, a built-in name, pkg.mod:Class, pkg.mod.Class, or a class.

    Raises: InvalidConfig: it cannot be loaded, or does not keep the form of the hook; names it and its distribution.
    """
    if not isinstance(given, str | type):
        raise InvalidConfig(f"{KEY}: {given!r} must be a class, or the name of one")
    names = entry_point_names(GROUP)
    found: object = given
    if isinstance(given, str):
        place = given if given in names else BUILTIN_PROCESSORS.get(given, given)
        found = find_class(place, GROUP, object, KEY, BUILTIN_PROCESSORS, HOOK)
    what = f"{KEY} {given!r}" if isinstance(given, str) else KEY
    owner = _owner(given, found)
    cls = _checked(found, f"{what} ({_place(found)} of {owner or 'no installed distribution'})")
    is_short = isinstance(given, str) and (given in names or given in BUILTIN_PROCESSORS)
    arguments = cls.extra_arg_names
    info = ProcessorInfo(
        name=cls.name or (str(given) if is_short else _place(cls)),
        place=_place(cls),
        distribution=owner,
        extra_arg_names=None if arguments is None else tuple(sorted(set(arguments))),
        parameter_schema="" if cls.parameter_schema is None else json.dumps(cls.parameter_schema, sort_keys=True),
    )
    return LoadedProcessor(cls, info)


def failure_message(info: ProcessorInfo, method: str, why: BaseException | str) -> str:
    """Tell that a method of a processor failed: it raised this, or did what the text says."""
    said = why if isinstance(why, str) else f"{type(why).__name__}: {_text(why)}"
    called = info.place if info.name == info.place else f"{info.name} ({info.place})"
    return f"logits processor {called} failed in {method}: {said}"


def refusal_text(error: Exception) -> str:
    """Return what a processor says to the caller whose request it refuses."""
    return _text(error)


def _text(error: BaseException) -> str:
    """Return an exception's message, as far as it has one that can be told."""
    try:
        text = str(error)
    except BaseException:  # it is a plug-in's: anything may happen in it
        return "it has no message that can be read"
    text = text if len(text) <= MAX_MESSAGE_CHARACTERS else text[:MAX_MESSAGE_CHARACTERS] + "..."
    return text.encode("utf-8", "replace").decode("utf-8")  # no message on the wire holds half a surrogate pair


def _place(found: object) -> str:
    return f"{getattr(found, '__module__', '?')}:{getattr(found, '__qualname__', repr(found))}"


def _owner(given: object, found: object) -> str:
    """Return name and version of the distribution that brings the class; empty if there is none."""
    for entry in entry_points(group=GROUP):
        if entry.name == given and entry.dist is not None:
            return f"{entry.dist.name} {entry.dist.version}"
    return distribution_of(str(getattr(found, "__module__", "")))


def _sections(config: str | Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    sections: object = config
    if isinstance(config, str):
        try:
            sections = json.loads(config) if config.strip() else {}
        except ValueError as error:
            raise InvalidConfig(f"{CONFIG_KEY} must be a JSON object of sections by name: {error}") from error
    if not (isinstance(sections, Mapping) and all(isinstance(each, Mapping) for each in sections.values())):
        raise InvalidConfig(f"{CONFIG_KEY} must be a JSON object whose values are objects: a section for each name")
    return sections


# -- the form of the hook -----------------------------------------------------------------------------------------


def _checked(found: object, what: str) -> type[LogitsProcessor]:
    """Return the class. Raises: InvalidConfig: the form of the hook is not kept."""
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        fault = f"it must be a subclass of {HOOK}"
        if isinstance(found, type) and callable(getattr(found, "apply", None)):
            fault += "; a class that was written for another interface is not adapted"
        raise InvalidConfig(f"{what}: {fault}; {REMEDY}")
    faults = [*_unfinished(found), *_wrong_signatures(found), *_wrong_declarations(found)]
    if faults:
        raise InvalidConfig(f"{what}: {'; '.join(faults)}; {REMEDY}")
    return found


def _unfinished(cls: type[LogitsProcessor]) -> Iterator[str]:
    if inspect.isabstract(cls):
        yield f"it must define {', '.join(sorted(cls.__abstractmethods__))}"


def _wrong_signatures(cls: type[LogitsProcessor]) -> Iterator[str]:
    if not _takes(cls, 2):
        yield f"__init__ must take config and req_states, is {_signature(cls.__init__)}"
    for name, num_arguments in _CALLS.items():
        method = inspect.getattr_static(cls, name)
        if not inspect.isfunction(method):
            yield f"{name} must be a method of its instances"
            continue
        if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
            yield f"{name} must be a plain function: nobody awaits or iterates it"
        elif not _takes(method, 1 + num_arguments):
            expected = ", ".join(inspect.signature(getattr(LogitsProcessor, name)).parameters)
            yield f"{name} must take ({expected}), is {_signature(method)}"
    validate = inspect.getattr_static(cls, "validate_params")
    if not isinstance(validate, classmethod):
        yield "validate_params must be a class method: admission has no instance"
    elif inspect.iscoroutinefunction(validate.__func__):
        yield "validate_params must be a plain function: nobody awaits it"
    elif not _takes(cls.validate_params, 1):
        yield f"validate_params must take (cls, sampling_params), is {_signature(validate.__func__)}"


def _takes(function: Callable[..., object], num_arguments: int) -> bool:
    """Tell whether something can be called with so many arguments, none of them by name."""
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except (TypeError, ValueError):
        return False
    return True


def _signature(function: Callable[..., object]) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return "no function that tells its arguments"


def _wrong_declarations(cls: type[LogitsProcessor]) -> Iterator[str]:
    if not isinstance(cls.name, str):
        yield f"name must be a text, is {cls.name!r}"
    names: object = cls.extra_arg_names
    if names is not None and not (
        isinstance(names, Sequence)
        and not isinstance(names, str)
        and all(isinstance(name, str) and name for name in names)
    ):
        yield f"extra_arg_names must be None or a tuple of names, is {names!r}"
    schema: object = cls.parameter_schema
    if schema is None:
        return
    if not isinstance(schema, Mapping):
        yield f"parameter_schema must be None or a mapping, is {schema!r}"
        return
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        yield f"parameter_schema cannot be written as JSON: {error}"
