"""One table of named classes, for every hook that is chosen by name.

Knows names and base classes; what a class does, and when a plug-in's module is imported, is its users' business.
"""

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from plugins.errors import InvalidConfig

logger = logging.getLogger(__name__)


T = TypeVar("T")


class Registry(Generic[T]):
    """Name to class. Filled while modules are imported, read afterwards; one instance per hook and process.

    Names are lower-cased on both sides. Invariant: every registered class derives from `base`.
    """

    def __init__(self, kind: str, base: type[T]) -> None:
        self._kind = kind
        self._base = base
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Return a class decorator. An existing name is replaced, with a warning.

        Raises: InvalidConfig: what is decorated does not derive from the hook's base class.
        """

        def add(cls: type[T]) -> type[T]:
            key = name.lower()
            if key in self._classes:
                logger.warning("plugin_replaced", extra={"kind": self._kind, "plugin": key, "by": cls.__qualname__})
            if not (isinstance(cls, type) and issubclass(cls, self._base)):
                raise InvalidConfig(f"{self._kind} {key!r}: {cls!r} must be a subclass of {self._base.__qualname__}")
            self._classes[key] = cls
            logger.debug("plugin_registered", extra={"kind": self._kind, "plugin": key})
            return cls

        return add

    def get(self, name: str) -> type[T]:
        """Look a class up by name, in any case.

        Raises: InvalidConfig: nothing has that name; the message lists what there is.
        """
        try:
            return self._classes[name.lower()]
        except KeyError:
            known = ", ".join(self.names()) or "<none>"
            raise InvalidConfig(f"unknown {self._kind} {name!r}; known: {known}") from None

    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self._classes))
