"""Builds the whole configuration once, at start: flags, then environment, then file, then defaults.

Sections are frozen dataclasses beside their users; this module only finds them, refuses what it does not know,
and remembers where each value came from.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml
from pydantic import Field, ValidationError, create_model
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from control_plane.admission.config import AdmissionConfig
from control_plane.api.config import ServerConfig
from control_plane.logs import LogConfig
from control_plane.scheduling.config import SchedulerConfig
from control_plane.telemetry import MetricsConfig
from control_plane.workers.config import WorkersConfig
from plugins.config import PluginsConfig
from plugins.errors import InvalidConfig

T = TypeVar("T")

SECTION_GROUP = "dihedral.config_sections"  # entry points: a section's name to its dataclass
PREFIX = "DIHEDRAL_"
CONFIG_VARIABLE = "DIHEDRAL_CONFIG"  # path of the file, if no flag names one
SECRET = "***"  # stands for a secret wherever values are shown
NONE_WORDS = ("none", "null")  # how help and YAML say None, in letters of either case
RESERVED_VARIABLES = (CONFIG_VARIABLE, "DIHEDRAL_PARENT_FD")
CONTROL_PLANE_SECTIONS: Mapping[str, type[Any]] = {
    "server": ServerConfig,
    "admission": AdmissionConfig,
    "scheduler": SchedulerConfig,
    "workers": WorkersConfig,
    "plugins": PluginsConfig,
    "log": LogConfig,
    "metrics": MetricsConfig,
}

# Kubernetes sets such variables for every service of the namespace, ours included: DIHEDRAL_SERVICE_HOST,
# DIHEDRAL_WORKER_PORT_50061_TCP_ADDR, DIHEDRAL_PORT=tcp://10.0.0.1:50051.
SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)$")
SERVICE_URL = re.compile(r"^(tcp|udp)://")


@dataclass(frozen=True, slots=True)
class Source:
    """The values that one place gives, by dotted key such as server.port, and how that place spells a key."""

    values: Mapping[str, object]
    place: str  # such as "in the environment"
    spell: Callable[[str], str]  # a dotted key, as it is written there


class Config:
    """The resolved configuration of one process. Never changes."""

    def __init__(self, sections: Mapping[str, object], origins: Mapping[str, str]) -> None:
        self._sections = dict(sections)
        self._origins = dict(origins)

    def section(self, kind: type[T]) -> T:
        """Return the section that this dataclass describes. Raises: InvalidConfig: there is none."""
        for instance in self._sections.values():
            if isinstance(instance, kind):
                return instance
        raise InvalidConfig(f"no section of the configuration is a {kind.__qualname__}; is its plug-in installed?")

    def origin(self, key: str) -> str | None:
        """Tell who set a dotted key, such as `--port`; None: it has its default."""
        return self._origins.get(key)

    def replaced(self, values: Mapping[str, object]) -> "Config":
        """Return the configuration with other values for some dotted keys, which keep their origins.

        Raises: InvalidConfig: a section refuses a value.
        """
        changed = {
            name: dataclasses.replace(cast(Any, self._sections[name]), **tree) for name, tree in _nested(values).items()
        }
        return Config(self._sections | changed, self._origins)

    def resolved(self, names: Iterable[str]) -> dict[str, dict[str, object]]:
        """Return every value of some sections, by section and key, to be shown: a secret that is set is `***`."""
        return {name: _shown(self._sections[name]) for name in names}


def is_secret(field: "dataclasses.Field[Any]") -> bool:
    """True of a key whose value is shown to nobody: its metadata says `{"secret": True}`."""
    return bool(field.metadata.get("secret"))


def find_sections() -> dict[str, type[Any]]:
    """Find every section: the control plane's own, then those of other distributions and planes, by name.

    Raises: InvalidConfig: a section cannot be loaded, or two have one name.
    """
    sections = dict(CONTROL_PLANE_SECTIONS)
    for entry in sorted(entry_points(group=SECTION_GROUP), key=lambda entry: entry.name):
        owner = entry.dist.name if entry.dist else "an unknown distribution"
        if entry.name in sections:
            raise InvalidConfig(f"section {entry.name!r} of {owner} exists already; uninstall one of the two")
        try:
            sections[entry.name] = entry.load()
        except Exception as error:
            raise InvalidConfig(
                f"section {entry.name!r} ({entry.value}) of {owner} cannot be loaded: {error!r}; repair or uninstall it"
            ) from error
    return sections


def load_config(
    sections: Mapping[str, type[Any]], flags: Source, environ: Mapping[str, str], file: Path | None
) -> Config:
    """Build the tree. `file` None: the one that DIHEDRAL_CONFIG names, if any.

    Raises: InvalidConfig: an unknown key, a value of the wrong type or out of its range, an unreadable file. The
        message names the key as it was spelled, and the nearest known one.
    """
    if file is None and environ.get(CONFIG_VARIABLE):
        file = Path(environ[CONFIG_VARIABLE])
    sources = [flags, read_environment(environ), *([read_file(file)] if file else [])]
    optional, lists = _optional_keys(sections), _list_keys(sections)
    origins: dict[str, str] = {}
    for source in sources:
        _refuse_unknown(source, sections)
        for key in source.values:
            origins.setdefault(key, f"{source.spell(key)} {source.place}")
    trees = [_nested(_without_words(_with_lists(source.values, lists), optional)) for source in sources]
    try:
        root = _root_model(sections, trees)()
    except ValidationError as error:
        raise InvalidConfig("; ".join(_describe(each, origins) for each in error.errors())) from error
    return Config({name: getattr(root, name) for name in sections}, origins)


def known_keys(sections: Mapping[str, type[Any]]) -> tuple[str, ...]:
    """All dotted keys, in order."""
    return tuple(f"{name}.{each.name}" for name, kind in sections.items() for each in dataclasses.fields(kind))


def nearest(key: str, keys: Sequence[str]) -> tuple[str, ...]:
    """Return the known dotted keys that were probably meant; empty if none is near."""
    names = {known: known.rpartition(".")[2] for known in keys}
    name = key.rpartition(".")[2]
    similar = difflib.get_close_matches(name, set(names.values()), n=1, cutoff=0.7)
    for close in (
        [known for known in keys if names[known] == name],
        difflib.get_close_matches(key, keys, n=1, cutoff=0.8),
        [known for known in keys if names[known] in similar],
        difflib.get_close_matches(key, keys, n=1),
    ):
        if close:
            return tuple(close)
    return ()


def read_environment(environ: Mapping[str, str]) -> Source:
    """Read every variable of our prefix, DIHEDRAL_SERVER__PORT as server.port, except those Kubernetes makes."""
    values: dict[str, object] = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in RESERVED_VARIABLES:
            continue
        if "__" not in variable and (SERVICE_LINK.search(variable) or SERVICE_URL.match(value)):
            continue
        values[variable.removeprefix(PREFIX).lower().replace("__", ".", 1)] = value
    return Source(values, "in the environment", lambda key: PREFIX + key.upper().replace(".", "__", 1))


def read_file(path: Path) -> Source:
    """Read a YAML file of sections.

    Raises: InvalidConfig: it cannot be read, or is no mapping of sections to mappings.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidConfig(f"configuration file {path} cannot be read: {reason}") from error
    except yaml.YAMLError as error:
        # Its own text quotes the line, which may hold a secret.
        raise InvalidConfig(f"configuration file {path} cannot be read: {_where(error)}") from None
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise InvalidConfig(f"configuration file {path} must hold sections, such as `server:`, each with its keys")
    values: dict[str, object] = {}
    for name, section in tree.items():
        if section is None:
            continue
        if not isinstance(section, dict):
            values[str(name)] = section  # refused by name
            continue
        values |= {f"{name}.{key}": value for key, value in section.items()}
    return Source(values, f"in {path}", str)


def _shown(section: object) -> dict[str, object]:
    values: dict[str, object] = dataclasses.asdict(cast(Any, section))
    for field in dataclasses.fields(cast(Any, section)):
        if is_secret(field) and values[field.name]:
            values[field.name] = SECRET
    return values


def _where(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or "it is no YAML"
    return f"{problem} in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else str(problem)


def _refuse_unknown(source: Source, sections: Mapping[str, type[Any]]) -> None:
    keys = known_keys(sections)
    for key in source.values:
        if key in keys:
            continue
        written = f"{source.spell(key)} {source.place}"
        if key in sections:
            example = dataclasses.fields(sections[key])[0].name
            raise InvalidConfig(f"{written} is a section; give it keys, such as {source.spell(f'{key}.{example}')}")
        close = " or ".join(source.spell(known) for known in nearest(key, keys))
        hint = f"did you mean {close}?" if close else f"sections are {', '.join(sections)}"
        raise InvalidConfig(f"unknown key {written}; {hint}")


def _optional_keys(sections: Mapping[str, type[Any]]) -> set[str]:
    """All dotted keys that may be None."""
    return {
        f"{name}.{key}"
        for name, kind in sections.items()
        for key, hint in get_type_hints(kind).items()
        if NoneType in get_args(hint)
    }


def _without_words(values: Mapping[str, object], optional: Collection[str]) -> dict[str, object]:
    """Put None where a word says it, for keys that may be None."""
    return {
        key: None if key in optional and isinstance(value, str) and value.lower() in NONE_WORDS else value
        for key, value in values.items()
    }


def _list_keys(sections: Mapping[str, type[Any]]) -> set[str]:
    """All dotted keys that hold several values."""
    return {
        f"{name}.{key}"
        for name, kind in sections.items()
        for key, hint in get_type_hints(kind).items()
        if get_origin(hint) is tuple
    }


def _with_lists(values: Mapping[str, object], lists: Collection[str]) -> dict[str, object]:
    """Split texts at commas, for keys that hold several values: the environment has no other way to write them."""
    return {key: _split(value) if key in lists else value for key, value in values.items()}


def _split(value: object) -> object:
    texts = (value,) if isinstance(value, str) else value
    if not (isinstance(texts, tuple | list) and all(isinstance(text, str) for text in texts)):
        return value  # refused by its type
    return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())


def _nested(values: Mapping[str, object]) -> dict[str, Any]:
    tree: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        tree.setdefault(name, {})[rest] = value
    return tree


def _root_model(sections: Mapping[str, type[Any]], trees: list[dict[str, Any]]) -> type[BaseSettings]:
    """Make the settings class of these sections that reads these trees, the first one winning."""

    class Root(BaseSettings):
        model_config = SettingsConfigDict(extra="forbid")

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: object, **__: object
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return tuple(InitSettingsSource(settings_cls, tree) for tree in trees)

    fields: dict[str, Any] = {name: (kind, Field(default_factory=kind)) for name, kind in sections.items()}
    return create_model("Config", __base__=Root, **fields)


def _describe(problem: ErrorDetails, origins: Mapping[str, str]) -> str:
    key = ".".join(str(part) for part in problem["loc"][:2])
    ours = problem.get("ctx", {}).get("error")
    if not isinstance(ours, InvalidConfig):
        return f"{key}: {problem['msg']} ({origins.get(key, 'default')})"
    named = [origin for each, origin in origins.items() if each in str(ours)]
    return f"{ours} ({', '.join(named)})" if named else str(ours)
