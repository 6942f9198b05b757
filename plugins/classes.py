"""Finds the class that a configuration names: an entry point of some distribution, or a place in a module.

Imports nothing before it is asked. What the class is for, and its registry if it has one, is its hook's business.
"""

import inspect
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, distribution, entry_points, packages_distributions
from typing import TypeVar, cast

from plugins.errors import InvalidConfig

T = TypeVar("T")


class BlockedImport(ImportError):
    """This process refuses a package on purpose. A plug-in that asks for it while it is imported cannot be loaded."""


def find_class(
    name: str, group: str, base: type[T], kind: str, builtin: Iterable[str] = (), hook: str | None = None
) -> type[T]:
    """Find a class by the name of an entry point, by pkg.mod:Class, or by pkg.mod.Class, in this order.

    `kind` is what messages call the name, best the configuration's key; `builtin` are names that the caller knows
    by itself, for the list of what there is; `hook` is what messages call `base`, where its own name says nothing.
    Raises: InvalidConfig: nothing has that name, two distributions claim it, the plug-in cannot be imported, or what
        it names is no class that derives from `base` and defines all of its abstract methods.
    """
    entries = [entry for entry in entry_points(group=group) if entry.name == name]
    if len(entries) > 1:
        raise InvalidConfig(
            f"{kind} {name!r} is claimed by {' and '.join(sorted(_owner(entry.dist) for entry in entries))}; "
            f"uninstall all but one, or name the class itself: {' or '.join(sorted(entry.value for entry in entries))}"
        )
    place = entries[0].value if entries else name
    module, attributes = _split(place)
    if not module:
        known = ", ".join(sorted({*builtin, *entry_point_names(group)})) or "<none>"
        raise InvalidConfig(
            f"unknown {kind} {name!r}; known: {known}; or name a class as pkg.mod:Class (entry-point group {group})"
        )
    try:
        found: object = import_module(module)
    except (Exception, SystemExit) as error:  # a plug-in's module may raise anything while it is imported
        raise _cannot_load(kind, name, place, module, entries, error) from error
    try:
        for attribute in attributes:
            found = getattr(found, attribute)
    except AttributeError as error:
        raise _cannot_load(kind, name, place, module, entries, error) from error
    fault = _fault(found, base, hook)
    if fault:
        raise InvalidConfig(f"{kind} {name!r} ({place} of {_owner(_distribution(module, entries))}): {fault}")
    return cast(type[T], found)


def check_class(found: object, base: type[T], what: str, hook: str | None = None) -> type[T]:
    """Return what was found, or given, if it is a class that can be built.

    `what` is how messages call it, and `hook` how they call `base`.

    Raises: InvalidConfig: it is no class, does not derive from `base`, or leaves abstract methods of it undefined.
    """
    fault = _fault(found, base, hook)
    if fault:
        raise InvalidConfig(f"{what}: {fault}")
    return cast(type[T], found)


def entry_point_names(group: str) -> tuple[str, ...]:
    """The names of a group of entry points, sorted."""
    return tuple(sorted({entry.name for entry in entry_points(group=group)}))


def distribution_of(module: str) -> str:
    """Return name and version of the distribution that a module belongs to; empty if it belongs to none."""
    dist = _distribution(module, ())
    return f"{dist.name} {dist.version}" if dist is not None else ""


def _fault(found: object, base: type[object], hook: str | None) -> str:
    """Say why something is no class of a hook that can be built; empty if it is one."""
    hook = hook or f"{base.__module__}.{base.__qualname__}"
    if not (isinstance(found, type) and issubclass(found, base)):
        return f"{found!r} must be a subclass of {hook}"
    if inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        return f"{found.__qualname__} must define {missing}, as {hook} describes"
    return ""


def _split(place: str) -> tuple[str, list[str]]:
    """Return module and attributes; the module is empty if the text names no place in one."""
    module, colon, attributes = place.partition(":")
    if not colon:
        module, _, attributes = place.rpartition(".")
    words = [*module.split("."), *attributes.split(".")]
    return (module, attributes.split(".")) if all(word.isidentifier() for word in words) else ("", [])


def _cannot_load(
    kind: str, name: str, place: str, module: str, entries: Sequence[EntryPoint], error: BaseException
) -> InvalidConfig:
    dist = _distribution(module, entries)
    repaired = f"or install a version of {dist.name} that fits" if dist is not None else "or correct the module"
    match error:
        case ModuleNotFoundError(name=str(missing)) if f"{module}.".startswith(f"{missing}."):
            remedy = f"install the package that has {missing!r}, or correct the name"
            if dist is None:
                remedy += "; a module of the current folder is found with PYTHONPATH=."
        case ModuleNotFoundError():
            remedy = f"install what it needs, {repaired}"
        case AttributeError() if error.__traceback__ is not None and error.__traceback__.tb_next is None:
            remedy = f"correct the name, {repaired}"  # the module itself was imported
        case BlockedImport():
            remedy = f"import it inside the methods that need it, {repaired}"
        case _:
            remedy = f"its module raised this while it was imported; set up what it wants, {repaired}"
    return InvalidConfig(
        f"{kind} {name!r} ({place} of {_owner(dist)}) cannot be loaded: {type(error).__name__}: {error}; {remedy}"
    )


def _distribution(module: str, entries: Sequence[EntryPoint]) -> Distribution | None:
    """Return the distribution of an entry point or, without one, of a module's package; None if there is none."""
    if entries:
        return entries[0].dist
    owners = packages_distributions().get(module.partition(".")[0], [])
    return distribution(owners[0]) if owners else None


def _owner(dist: Distribution | None) -> str:
    return f"{dist.name} {dist.version}" if dist is not None else "no installed distribution"
