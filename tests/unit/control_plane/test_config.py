"""The configuration tree: precedence, unknown keys, and messages that say where a value came from."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from control_plane.config import Config, Source, find_sections, load_config, read_environment, read_file
from control_plane.logs import LogConfig
from control_plane.scheduling.config import SchedulerConfig
from control_plane.telemetry import MetricsConfig
from gpu_worker.config import WorkerConfig
from plugins.config import PluginsConfig
from plugins.errors import InvalidConfig, ServingError


@dataclass(frozen=True, slots=True, kw_only=True)
class KitchenConfig:
    port: int = 1
    name: str | None = None
    open: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GardenConfig:
    port: int = 2
    num_trees: int = 3

    def __post_init__(self) -> None:
        if self.num_trees < 0:
            raise InvalidConfig(f"garden.num_trees must be at least 0, is {self.num_trees}")


SECTIONS: Mapping[str, type[Any]] = {"kitchen": KitchenConfig, "garden": GardenConfig}


def load(
    flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None, file: Path | None = None
) -> Config:
    source = Source(flags or {}, "on the command line", lambda key: f"--{key}")
    return load_config(SECTIONS, source, environ or {}, file)


def write(folder: Path, text: str) -> Path:
    path = folder / "dihedral.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_section_has_its_defaults_when_nothing_is_set() -> None:
    config = load()

    assert config.section(KitchenConfig) == KitchenConfig(port=1, name=None, open=True)
    assert config.section(GardenConfig) == GardenConfig(port=2, num_trees=3)
    assert config.origin("kitchen.port") is None


@pytest.mark.parametrize(
    ("flags", "environ", "text"),
    [
        ({"plugins.logits_processors": ("a", "b:C")}, {}, ""),
        ({"plugins.logits_processors": ("a,b:C",)}, {}, ""),
        ({}, {"DIHEDRAL_PLUGINS__LOGITS_PROCESSORS": "a, b:C,"}, ""),
        ({}, {}, "plugins: {logits_processors: [a, b:C]}"),
        ({}, {}, "plugins: {logits_processors: 'a,b:C'}"),
    ],
)
def test_a_list_is_written_with_commas_or_as_the_place_writes_lists(
    flags: Mapping[str, object], environ: Mapping[str, str], text: str, tmp_path: Path
) -> None:
    source = Source(flags, "on the command line", str)

    config = load_config({"plugins": PluginsConfig}, source, environ, write(tmp_path, text))

    assert config.section(PluginsConfig).logits_processors == ("a", "b:C")


@pytest.mark.parametrize("text", ["plugins: {logits_processors: 3}", "plugins: {logits_processors: [3]}"])
def test_a_list_of_something_else_is_refused_with_its_key(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"plugins\.logits_processors"):
        load_config({"plugins": PluginsConfig}, Source({}, "", str), {}, write(tmp_path, text))


def test_a_flag_wins_over_the_environment_which_wins_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "kitchen: {port: 10, name: file}\ngarden: {port: 10, num_trees: 10}\n")

    config = load(
        flags={"kitchen.port": 30},
        environ={"DIHEDRAL_KITCHEN__PORT": "20", "DIHEDRAL_GARDEN__PORT": "20"},
        file=file,
    )

    assert config.section(KitchenConfig) == KitchenConfig(port=30, name="file")
    assert config.section(GardenConfig) == GardenConfig(port=20, num_trees=10)
    assert config.origin("kitchen.port") == "--kitchen.port on the command line"
    assert config.origin("garden.port") == "DIHEDRAL_GARDEN__PORT in the environment"
    assert config.origin("garden.num_trees") == f"garden.num_trees in {file}"


def test_text_is_read_as_the_type_of_its_key() -> None:
    config = load(environ={"DIHEDRAL_KITCHEN__OPEN": "false", "DIHEDRAL_GARDEN__NUM_TREES": "7"})

    assert config.section(KitchenConfig).open is False
    assert config.section(GardenConfig).num_trees == 7


@pytest.mark.parametrize("word", ["None", "null"])
def test_a_key_that_may_be_none_is_so_by_the_word_of_help_and_of_yaml(tmp_path: Path, word: str) -> None:
    file = write(tmp_path, "kitchen: {name: file}\n")

    by_variable = load(environ={"DIHEDRAL_KITCHEN__NAME": word}, file=file)
    by_file = load(file=write(tmp_path, f"kitchen: {{name: {word}}}\n"))

    assert by_variable.section(KitchenConfig).name is None
    assert by_file.section(KitchenConfig).name is None


def test_a_key_that_must_have_a_value_refuses_none() -> None:
    with pytest.raises(InvalidConfig, match="garden.port: Input should be a valid integer"):
        load(environ={"DIHEDRAL_GARDEN__PORT": "None"})


def test_dihedral_config_names_the_file_when_no_flag_does(tmp_path: Path) -> None:
    named = write(tmp_path, "garden: {num_trees: 5}\n")

    config = load(environ={"DIHEDRAL_CONFIG": str(named)})

    assert config.section(GardenConfig).num_trees == 5


def test_an_empty_file_and_an_empty_section_set_nothing(tmp_path: Path) -> None:
    assert load(file=write(tmp_path, "")).section(GardenConfig).num_trees == 3
    assert load(file=write(tmp_path, "garden:\n")).section(GardenConfig).num_trees == 3


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        (
            {"garden.num_tress": 1},
            {},
            "unknown key --garden.num_tress on the command line; did you mean --garden.num_trees?",
        ),
        (
            {},
            {"DIHEDRAL_GARDEN__NUM_TREE": "1"},
            "unknown key DIHEDRAL_GARDEN__NUM_TREE in the environment; did you mean DIHEDRAL_GARDEN__NUM_TREES?",
        ),
        (
            {},
            {"DIHEDRAL_PRT": "1"},
            "unknown key DIHEDRAL_PRT in the environment; did you mean "
            "DIHEDRAL_KITCHEN__PORT or DIHEDRAL_GARDEN__PORT?",
        ),
        (
            {},
            {"DIHEDRAL_KITCHEN__NUM_TREES": "1"},
            "unknown key DIHEDRAL_KITCHEN__NUM_TREES in the environment; did you mean DIHEDRAL_GARDEN__NUM_TREES?",
        ),
        (
            {},
            {"DIHEDRAL_XQZ": "1"},
            "unknown key DIHEDRAL_XQZ in the environment; sections are kitchen, garden",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_its_nearest_neighbour(
    flags: Mapping[str, object], environ: Mapping[str, str], message: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(flags=flags, environ=environ)

    assert str(caught.value) == message


def test_an_unknown_key_of_a_file_names_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "garden: {num-trees: 1}\n")

    with pytest.raises(InvalidConfig) as caught:
        load(file=file)

    assert str(caught.value) == f"unknown key garden.num-trees in {file}; did you mean garden.num_trees?"


def test_a_value_where_a_section_belongs_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "garden: 5\n")

    with pytest.raises(InvalidConfig) as caught:
        load(file=file)

    assert str(caught.value) == f"garden in {file} is a section; give it keys, such as garden.port"


def test_a_value_of_the_wrong_type_names_key_and_place() -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(environ={"DIHEDRAL_KITCHEN__PORT": "many"})

    assert str(caught.value).startswith("kitchen.port: Input should be a valid integer")
    assert str(caught.value).endswith("(DIHEDRAL_KITCHEN__PORT in the environment)")


def test_a_value_that_its_section_refuses_keeps_the_sections_message_and_names_the_place() -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(flags={"garden.num_trees": -1})

    assert str(caught.value) == "garden.num_trees must be at least 0, is -1 (--garden.num_trees on the command line)"
    assert isinstance(caught.value, ServingError)
    assert isinstance(caught.value, ValueError)


def test_several_wrong_values_are_told_together() -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(flags={"garden.num_trees": -1, "kitchen.port": "x"})

    assert "kitchen.port: " in str(caught.value)
    assert "garden.num_trees must be at least 0" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("garden: [", "cannot be read: expected the node content, but found '<stream end>' in line 1"),
        ("- garden", "must hold sections"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)

    with pytest.raises(InvalidConfig) as caught:
        load(file=file)

    assert str(caught.value).startswith(f"configuration file {file} {message}")


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(file=tmp_path / "none.yaml")

    assert str(caught.value) == f"configuration file {tmp_path}/none.yaml cannot be read: No such file or directory"


def test_variables_that_kubernetes_makes_for_services_are_not_keys() -> None:
    source = read_environment(
        {
            "DIHEDRAL_PORT": "tcp://10.0.0.1:50051",
            "DIHEDRAL_SERVICE_HOST": "10.0.0.1",
            "DIHEDRAL_SERVICE_PORT_GRPC": "50051",
            "DIHEDRAL_WORKER_PORT_50061_TCP_ADDR": "10.0.0.2",
            "DIHEDRAL_PARENT_FD": "7",
            "HOME": "/",
        }
    )

    assert source.values == {}


def test_a_port_variable_that_is_no_service_url_is_still_refused() -> None:
    with pytest.raises(InvalidConfig, match="unknown key DIHEDRAL_PORT in the environment"):
        load(environ={"DIHEDRAL_PORT": "50051"})


def test_a_section_that_nobody_provides_is_an_error() -> None:
    with pytest.raises(InvalidConfig, match="no section of the configuration is a LogConfig"):
        load().section(LogConfig)


def test_the_sections_of_both_planes_are_found() -> None:
    sections = find_sections()

    assert sections["worker"] is WorkerConfig
    assert sections["log"] is LogConfig
    assert sections["metrics"] is MetricsConfig


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("log", "gpu_worker.config:WorkerConfig", "section 'log' of an unknown distribution exists already"),
        ("kennel", "no_such_package:Config", "section 'kennel' (no_such_package:Config) of an unknown distribution"),
    ],
)
def test_a_section_that_cannot_be_added_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    entry = EntryPoint(name, value, "dihedral.config_sections")
    monkeypatch.setattr("control_plane.config.entry_points", lambda group: [entry])

    with pytest.raises(InvalidConfig) as caught:
        find_sections()

    assert str(caught.value).startswith(message)


def test_resolved_values_are_listed_by_section() -> None:
    config = load(flags={"garden.port": 9})

    assert config.resolved(["garden"]) == {"garden": {"port": 9, "num_trees": 3}}


def test_a_secret_is_shown_to_nobody_and_its_user_gets_it() -> None:
    key = "0123456789abcdef"
    source = Source({"scheduler.prefix_hash_key": key}, "in the environment", str)

    config = load_config({"scheduler": SchedulerConfig}, source, {}, None)

    assert config.resolved(["scheduler"])["scheduler"]["prefix_hash_key"] == "***"
    assert key not in repr(config.section(SchedulerConfig))
    assert config.section(SchedulerConfig).prefix_hash_key == key


def test_what_logits_processors_are_configured_with_is_a_secret_too() -> None:
    sections = '{"watermark": {"key": "a key"}}'
    source = Source({"plugins.logits_processor_config": sections}, "in the environment", str)

    config = load_config({"plugins": PluginsConfig}, source, {}, None)
    unset = load_config({"plugins": PluginsConfig}, Source({}, "", str), {}, None)

    assert config.resolved(["plugins"])["plugins"]["logits_processor_config"] == "***"
    assert "a key" not in repr(config.section(PluginsConfig))
    assert config.section(PluginsConfig).logits_processor_config == sections
    assert unset.resolved(["plugins"])["plugins"]["logits_processor_config"] == ""


def test_a_secret_that_is_not_set_is_shown_as_such() -> None:
    config = load_config({"scheduler": SchedulerConfig}, Source({}, "", str), {}, None)

    assert config.resolved(["scheduler"])["scheduler"]["prefix_hash_key"] is None


def test_a_replaced_value_leaves_the_others_and_is_checked_by_its_section() -> None:
    config = load(flags={"garden.port": 9})

    replaced = config.replaced({"garden.num_trees": 4})

    assert replaced.resolved(["garden"]) == {"garden": {"port": 9, "num_trees": 4}}
    assert config.section(GardenConfig).num_trees == 3
    with pytest.raises(InvalidConfig, match="garden.num_trees must be at least 0, is -1"):
        config.replaced({"garden.num_trees": -1})


def test_the_error_of_a_damaged_file_does_not_quote_it(tmp_path: Path) -> None:
    file = tmp_path / "dihedral.yaml"
    file.write_text("scheduler:\n  prefix_hash_key: [topsecret1234567890\n")

    with pytest.raises(InvalidConfig) as caught:
        read_file(file)

    assert "topsecret" not in str(caught.value)
    assert "line 3" in str(caught.value)
