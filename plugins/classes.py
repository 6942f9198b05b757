"""Finds the class that a configuration names: an entry point of some distribution, or a place in a module.

Imports nothing before it is asked. What the class is for, and its registry if it has one, is its hook's business.
"""

import inspect
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, distribution, entry_points, packages_distributions
from typing import TypeVar

from plugins.errors import InvalidConfig

T = TypeVar("T")


def find_class(name: str, group: str, base: type[T], kind: str, builtin: Iterable[str] = ()) -> type[T]:
    """Find a class by the name of an entry point, by pkg.mod:Class, or by pkg.mod.Class, in this order.

    `kind` is what messages call the name, best the configuration's key; `builtin` are names that the caller knows
    by itself, for the list of what there is.
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
        for attribute in attributes:
            found = getattr(found, attribute)
    except Exception as error:  # a plug-in's module may raise anything while it is imported
        raise _cannot_load(kind, name, place, module, entries, error) from error
    return check_class(found, base, f"{kind} {name!r}")


def check_class(found: object, base: type[T], what: str) -> type[T]:
    """Return what was found, or given, if it is a class that can be built. `what` is how messages call it.

    Raises: InvalidConfig: it is no class, does not derive from `base`, or leaves abstract methods of it undefined.
    """
    if not (isinstance(found, type) and issubclass(found, base)):
        raise InvalidConfig(f"{what}: {found!r} must be a subclass of {base.__module__}.{base.__qualname__}")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise InvalidConfig(f"{what}: {found.__qualname__} must define {missing}, as {base.__qualname__} describes")
    return found


def entry_point_names(group: str) -> tuple[str, ...]:
    """The names of a group of entry points, sorted."""
    return tuple(sorted({entry.name for entry in entry_points(group=group)}))


def _split(place: str) -> tuple[str, list[str]]:
    """Return module and attributes; the module is empty if the text names no place in one."""
    module, colon, attributes = place.partition(":")
    if not colon:
        module, _, attributes = place.rpartition(".")
    words = [*module.split("."), *attributes.split(".")]
    return (module, attributes.split(".")) if all(word.isidentifier() for word in words) else ("", [])


def _cannot_load(
    kind: str, name: str, place: str, module: str, entries: Sequence[EntryPoint], error: Exception
) -> InvalidConfig:
    package = module.partition(".")[0]
    owners = packages_distributions().get(package, [])
    dist = entries[0].dist if entries else distribution(owners[0]) if owners else None
    if dist is not None:
        remedy = f"install what it needs, or a version of {dist.name} that fits"
    else:
        remedy = f"install the package that has {package!r}, or correct the name"
    return InvalidConfig(
        f"{kind} {name!r} ({place} of {_owner(dist)}) cannot be loaded: {type(error).__name__}: {error}; {remedy}"
    )


def _owner(dist: Distribution | None) -> str:
    return f"{dist.name} {dist.version}" if dist is not None else "no installed distribution"
