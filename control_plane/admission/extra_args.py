"""Checks the arguments of logits processors: each by the schema of the processor that reads it, then by its own code.

Knows what processors declare; whether extra_args are JSON, and of what size, was checked before.
"""

import difflib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry

from plugins.errors import FieldViolation, InvalidConfig, PluginFailed
from plugins.logits import LogitsProcessor, own_copy
from plugins.logits_loading import LoadedProcessor, failure_message, refusal_text
from plugins.types import ProcessorInfo, SamplingParams

logger = logging.getLogger(__name__)

FIELD: Final = "sampling.extra_args"
MAX_VIOLATIONS: Final = 10  # told of one processor's schema
MAX_NAME_CHARACTERS: Final = 64  # of an argument's name, where it is told
MAX_DESCRIPTION_CHARACTERS: Final = 200  # it may quote the argument


class ExtraArgs:
    """The processors of one control plane, as admission sees them. Stateless: may be called from any thread."""

    def __init__(self, processors: Sequence[LoadedProcessor]) -> None:
        """Raises: InvalidConfig: a processor's parameter_schema is no JSON schema."""
        classes = {each.cls: each for each in processors}  # one that is loaded twice need not say everything twice
        self._checks = tuple(check for each in classes.values() if (check := _Check(each)).finds_anything)
        known: set[str] = set()
        for each in processors:
            known.update(each.info.extra_arg_names or ())
        self._known = tuple(sorted(known))
        self._is_anything_read = any(each.info.extra_arg_names is None for each in processors)

    def violations(self, sampling: SamplingParams) -> list[FieldViolation]:
        """Return everything that is wrong with the arguments of one request.

        A processor is asked only about arguments that fit its schema.
        Raises: PluginFailed: a processor raised something else than ValueError.
        """
        found: list[FieldViolation] = []
        if sampling.extra_args and not self._is_anything_read:
            found += self._unclaimed(sampling.extra_args)
        for check in self._checks:
            own = check.schema_violations(sampling.extra_args)
            found += own or check.refusal(sampling)
        return found

    def _unclaimed(self, extra_args: Mapping[str, Any]) -> Iterator[FieldViolation]:
        for name in islice((name for name in extra_args if name not in self._known), MAX_VIOLATIONS):
            close = difflib.get_close_matches(_short(name), self._known, n=1)
            if close:
                hint = f"did you mean {close[0]}?"
            else:
                hint = f"arguments that are read: {', '.join(self._known) or '<none>'}"
            yield FieldViolation(_path(name), "UNKNOWN_ARGUMENT", f"no logits processor reads it; {hint}")


class _Check:
    """What one processor has to say about arguments."""

    def __init__(self, loaded: LoadedProcessor) -> None:
        self._info = loaded.info
        self._validate = loaded.cls.validate_params if _decides(loaded.cls) else None
        # A registry of its own: without one a $ref to another place would be fetched from the network.
        self._schema = (
            Draft202012Validator(_checked_schema(loaded.info), registry=Registry())
            if loaded.info.parameter_schema
            else None
        )

    @property
    def finds_anything(self) -> bool:
        """True of a processor that has a schema, or code of its own."""
        return self._schema is not None or self._validate is not None

    def schema_violations(self, extra_args: Mapping[str, Any]) -> list[FieldViolation]:
        """Check its part of the arguments, if the request gives any of them. Raises: PluginFailed: the schema does."""
        names = self._info.extra_arg_names
        if self._schema is None or not extra_args:
            return []
        own = dict(extra_args) if names is None else {name: extra_args[name] for name in names if name in extra_args}
        if not own:
            return []
        try:
            errors = list(islice(self._schema.iter_errors(own), MAX_VIOLATIONS))
        except Exception as error:  # such as a $ref that leads nowhere
            raise _failed(self._info, "parameter_schema", error) from error
        return list(dict.fromkeys(violation for error in errors for violation in self._told(error)))

    def refusal(self, sampling: SamplingParams) -> list[FieldViolation]:
        """Let its own code look at the request. Raises: PluginFailed: it raised something else than ValueError."""
        if self._validate is None:
            return []
        try:
            self._validate(own_copy(sampling))
        except ValueError as error:
            text = f"{self._info.name} refuses it: {refusal_text(error)}"
            return [FieldViolation(FIELD, "REFUSED_BY_PROCESSOR", text)]
        except (Exception, SystemExit) as error:  # it is a plug-in's, and ends no server
            raise _failed(self._info, "validate_params", error) from error
        return []

    def _told(self, error: ValidationError) -> Iterator[FieldViolation]:
        path = [str(part) for part in error.absolute_path]
        name = self._info.name
        needed, given = error.validator_value, error.instance
        if error.validator == "required" and isinstance(needed, list) and isinstance(given, dict) and not path:
            for missing in needed:
                if missing not in given:
                    yield FieldViolation(_path(missing), "SCHEMA_VIOLATION", f"{name} requires it")
            return
        within = f" (in {_clipped('.'.join(path[1:]))})" if path[1:] else ""
        description = f"{_clipped(error.message)}{within}, as {name} declares"
        yield FieldViolation(_path(path[0]) if path else FIELD, "SCHEMA_VIOLATION", description)


def _checked_schema(info: ProcessorInfo) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = json.loads(info.parameter_schema)
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise InvalidConfig(
            f"logits processor {info.name} ({info.place} of {info.distribution or 'no installed distribution'}): "
            f"its parameter_schema is no JSON schema of draft 2020-12: {error.message}; correct it there"
        ) from error
    return schema


def warn_of_undeclared(processors: Sequence[LoadedProcessor]) -> None:
    """Say which processors may read any argument: while one is loaded, a misspelt argument is nobody's error."""
    for info in (each.info for each in processors):
        if info.extra_arg_names is None:
            logger.warning(
                "logits_processor_undeclared",
                extra={
                    "processor": info.name,
                    "place": info.place,
                    "distribution": info.distribution,
                    "detail": "it declares no extra_arg_names, so that no argument of a request can be refused as "
                    "unknown",
                },
            )


def _decides(cls: type[LogitsProcessor]) -> bool:
    """Tell whether the class, or one of its bases, has a validate_params of its own."""
    inherited: object = LogitsProcessor.validate_params.__func__  # type: ignore[attr-defined]  # a class method has it
    return getattr(cls.validate_params, "__func__", None) is not inherited


def _failed(info: ProcessorInfo, method: str, error: BaseException) -> PluginFailed:
    logger.error(
        "logits_processor_failed",
        extra={"processor": info.name, "place": info.place, "method": method, "error": type(error).__name__},
    )
    return PluginFailed(failure_message(info, method, error))


def _path(name: str) -> str:
    return f"{FIELD}.{_short(name)}"


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARACTERS else name[:MAX_NAME_CHARACTERS] + "..."


def _clipped(text: str) -> str:
    return text if len(text) <= MAX_DESCRIPTION_CHARACTERS else text[:MAX_DESCRIPTION_CHARACTERS] + "..."
