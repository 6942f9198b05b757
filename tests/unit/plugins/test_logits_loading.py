"""Which logits processors a process loads, in which order, and what stops its start."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from plugins.errors import InvalidConfig
from plugins.logits import LogitsContext, LogitsProcessor, ProcessorConfig, RequestStates
from plugins.logits_loading import load_processor, load_processors
from plugins.types import ProcessorInfo, Row, SamplingParams

HERE = "tests.unit.plugins.test_logits_loading"


class Fine(LogitsProcessor):
    def __init__(self, config: ProcessorConfig, req_states: RequestStates) -> None: ...

    def add_request(self, req_idx: Row, sampling_params: SamplingParams) -> bool:
        return False

    def apply_staged_writes(self) -> None: ...

    def apply(self, logits: Any, ctx: LogitsContext) -> Any:
        return logits


class Declared(Fine):
    name = "declared"
    extra_arg_names = ("b", "a", "a")
    parameter_schema: ClassVar[Mapping[str, Any]] = {"type": "object"}


class Lenient(Fine):
    """Takes more than it is given, in names of its own."""

    def __init__(self, a: object, b: object, c: int = 3, **rest: object) -> None: ...

    def add_request(self, *args: Any) -> bool:
        return True

    def apply(self, scores: Any, where: LogitsContext, extra: int = 0) -> Any:
        return scores


class Unfinished(LogitsProcessor):
    def apply_staged_writes(self) -> None: ...


class OfAnotherInterface:
    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, update: object) -> None: ...

    def apply(self, logits: Any) -> Any:
        return logits


def changed(**members: Any) -> type[Any]:
    """Fine, with other members."""
    return type("Changed", (Fine,), members)


def no_schema() -> Mapping[str, Any]:
    loop: dict[str, Any] = {}
    loop["properties"] = loop
    return loop


async def awaited(self: object) -> None: ...


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path with a distribution `planted` 2.0 that has two processors."""
    info = tmp_path / "planted-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 2.0\n")
    (info / "top_level.txt").write_text("planted_broken\n")
    (info / "entry_points.txt").write_text(
        f"[dihedral.logits_processors]\nzebra = {HERE}:Fine\nant = {HERE}:Declared\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


# -- the list -----------------------------------------------------------------------------------------------------


def test_without_plug_ins_the_list_is_what_was_given() -> None:
    assert load_processors() == ()
    assert [each.cls for each in load_processors([Fine, f"{HERE}:Declared", f"{HERE}.Fine"])] == [Fine, Declared, Fine]


@pytest.mark.usefixtures("install")
def test_entry_points_come_first_sorted_by_name_then_the_list_in_its_order() -> None:
    loaded = load_processors([f"{HERE}:Lenient", "zebra", Fine])

    assert [each.cls for each in loaded] == [Declared, Fine, Lenient, Fine, Fine]
    assert [each.info.name for each in loaded] == ["declared", "zebra", f"{HERE}:Lenient", "zebra", f"{HERE}:Fine"]
    assert [each.info.distribution for each in loaded] == ["planted 2.0", "planted 2.0", "", "planted 2.0", ""]


def test_what_a_class_declares_is_published() -> None:
    info = load_processor(Declared).info

    assert info == ProcessorInfo(
        name="declared",
        place=f"{HERE}:Declared",
        distribution="",
        extra_arg_names=("a", "b"),
        parameter_schema='{"type": "object"}',
    )
    assert load_processor(Fine).info.extra_arg_names is None


@pytest.mark.parametrize("config", ['{"declared": {"depth": 3}}', {"declared": {"depth": 3}}])
def test_each_processor_gets_the_section_of_its_name(config: str | Mapping[str, Any]) -> None:
    loaded = load_processors([Declared, Fine, Declared], config)

    assert [each.section for each in loaded] == [{"depth": 3}, {}, {"depth": 3}]


# -- what stops the start -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "plugins.logits_processor_config must be a JSON object of sections by name: Expecting property name"),
        ("[]", "plugins.logits_processor_config must be a JSON object whose values are objects"),
        ('{"declared": 3}', "plugins.logits_processor_config must be a JSON object whose values are objects"),
        ('{"declard": {}}', "plugins.logits_processor_config has a section 'declard'; loaded processors: declared"),
    ],
)
def test_a_section_that_is_nobodys_stops_the_start(config: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(message)):
        load_processors([Declared], config)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (OfAnotherInterface, "must be a subclass of plugins.logits.LogitsProcessor; a class that was written for"),
        (int, "it must be a subclass of plugins.logits.LogitsProcessor; correct it as docs/logits_processors.md"),
        (Unfinished, "it must define __init__, add_request, apply"),
        (changed(__init__=lambda self: None), "__init__ must take config and req_states, is (self)"),
        (changed(add_request=lambda self, row: True), "add_request must take (self, req_idx, sampling_params), is"),
        (changed(apply_staged_writes=lambda self, now: None), "apply_staged_writes must take (self), is (self, now)"),
        (changed(apply=lambda self, logits: logits), "apply must take (self, logits, ctx), is (self, logits)"),
        (changed(apply=lambda self, logits, *, ctx: logits), "apply must take (self, logits, ctx), is"),
        (changed(apply=3), "apply must be a method of its instances"),
        (changed(apply=staticmethod(lambda logits, ctx: logits)), "apply must be a method of its instances"),
        (changed(apply_staged_writes=awaited), "apply_staged_writes must be a plain function: nobody awaits"),
        (changed(validate_params=lambda self, params: None), "validate_params must be a class method"),
        (
            changed(validate_params=classmethod(lambda cls: None)),
            "validate_params must take (cls, sampling_params), is",
        ),
        (changed(validate_params=classmethod(awaited)), "validate_params must be a plain function"),
        (changed(name=3), "name must be a text, is 3"),
        (changed(extra_arg_names="abc"), "extra_arg_names must be None or a tuple of names, is 'abc'"),
        (changed(extra_arg_names=("a", "")), "extra_arg_names must be None or a tuple of names, is ('a', '')"),
        (changed(extra_arg_names=3), "extra_arg_names must be None or a tuple of names, is 3"),
        (changed(parameter_schema="{}"), "parameter_schema must be None or a mapping, is '{}'"),
        (changed(parameter_schema={"x": {1}}), "parameter_schema cannot be written as JSON: Object of type set"),
        (changed(parameter_schema={"x": float("nan")}), "parameter_schema cannot be written as JSON"),
        (changed(parameter_schema=no_schema()), "parameter_schema cannot be written as JSON: Circular reference"),
    ],
)
def test_a_class_that_does_not_keep_the_form_is_refused_with_all_that_is_wrong(given: type[Any], fault: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(fault)) as caught:
        load_processors([given])

    assert str(caught.value).startswith(f"plugins.logits_processors ({given.__module__}:{given.__qualname__} of ")
    assert str(caught.value).endswith("correct it as docs/logits_processors.md describes, or leave it out")


def test_a_class_that_takes_more_than_it_is_given_keeps_the_form() -> None:
    assert load_processor(Lenient).cls is Lenient


@pytest.mark.usefixtures("install")
def test_what_is_wrong_with_an_entry_point_names_its_distribution(install: Path) -> None:
    entries = install / "planted-2.0.dist-info/entry_points.txt"
    entries.write_text(f"[dihedral.logits_processors]\nold = {HERE}:OfAnotherInterface\n")

    with pytest.raises(InvalidConfig) as caught:
        load_processors()

    assert str(caught.value) == (
        f"plugins.logits_processors 'old' ({HERE}:OfAnotherInterface of planted 2.0): it must be a subclass of "
        "plugins.logits.LogitsProcessor; a class that was written for another interface is not adapted; "
        "correct it as docs/logits_processors.md describes, or leave it out"
    )


def test_a_module_that_cannot_be_imported_names_its_distribution_and_the_remedy(install: Path) -> None:
    (install / "planted_broken.py").write_text("import planted_dependency\n")

    with pytest.raises(InvalidConfig) as caught:
        load_processors(["planted_broken:Class"])

    assert str(caught.value) == (
        "plugins.logits_processors 'planted_broken:Class' (planted_broken:Class of planted 2.0) cannot be loaded: "
        "ModuleNotFoundError: No module named 'planted_dependency'; install what it needs, or install a version of "
        "planted that fits"
    )


@pytest.mark.usefixtures("install")
def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(InvalidConfig, match="known: ant, ngram_repetition, thinking_budget, watermark, zebra;"):
        load_processors(["watermak"])


@pytest.mark.parametrize("given", [3, None, Fine.__new__(Fine)])
def test_what_is_neither_a_class_nor_a_name_is_refused(given: Any) -> None:
    with pytest.raises(InvalidConfig, match="must be a class, or the name of one"):
        load_processors([given])
