"""Flags made of dataclass fields: names, help, and every accepted spelling."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from control_plane.cli.flags import canonical, field_comments, make_flags, to_arguments
from plugins.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KitchenConfig:
    port: int = 1  # where the hatch is
    is_open: bool = True  # whether guests may come
    max_guests: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GardenConfig:
    port: int = 2  # where the gate is
    max_guests: int | None = None  # None: as many as come
    num_trees: int = 3  # apples, mostly


@dataclass(frozen=True, slots=True, kw_only=True)
class AtticConfig:
    num_trees: int = 0


SECTIONS: Mapping[str, type[Any]] = {"kitchen": KitchenConfig, "garden": GardenConfig, "attic": AtticConfig}
FLAGS = make_flags(SECTIONS, primary=("kitchen",))


def test_a_key_of_the_primary_section_has_the_short_name() -> None:
    names = {flag.key: flag.name for flag in FLAGS}

    assert names["kitchen.port"] == "--port"
    assert names["garden.port"] == "--garden.port"
    assert names["kitchen.is_open"] == "--is-open"


def test_the_first_primary_section_that_has_a_key_gets_its_short_name() -> None:
    names = {flag.key: flag.name for flag in make_flags(SECTIONS, primary=("attic", "garden"))}

    assert names["garden.port"] == "--port"
    assert names["attic.num_trees"] == "--num-trees"
    assert names["garden.num_trees"] == "--garden.num-trees"


def test_help_is_the_comment_beside_the_field() -> None:
    comments = field_comments(GardenConfig)

    assert comments == {
        "port": "where the gate is",
        "max_guests": "None: as many as come",
        "num_trees": "apples, mostly",
    }
    assert field_comments(AtticConfig) == {}


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--port", "--port"),
        ("--kitchen.port=7", "--port=7"),
        ("--garden.port", "--garden.port"),
        ("--kitchen.max_guests=2", "--max-guests=2"),
        ("--no-kitchen.is-open", "--no-is-open"),
        ("--unknown-flag", "--unknown-flag"),
        ("a_value", "a_value"),
    ],
)
def test_every_spelling_of_a_flag_is_understood(word: str, meant: str) -> None:
    assert canonical([word], FLAGS) == [meant]


def test_words_after_a_double_dash_are_left_alone() -> None:
    assert canonical(["--kitchen.port=7", "--", "--kitchen.port=7"], FLAGS) == ["--port=7", "--", "--kitchen.port=7"]


def test_a_key_of_several_sections_is_refused_with_the_names_that_would_do() -> None:
    with pytest.raises(InvalidConfig) as caught:
        canonical(["--num-trees", "4"], FLAGS)

    assert str(caught.value) == (
        "--num-trees is a key of several sections; say --garden.num-trees or --attic.num-trees"
    )


def test_values_become_arguments_that_name_their_section() -> None:
    assert to_arguments({"kitchen.max_guests": 3, "kitchen.is_open": False}) == [
        "--kitchen.max-guests=3",
        "--kitchen.is-open=False",
    ]


def test_a_key_with_several_values_becomes_an_argument_for_each() -> None:
    assert to_arguments({"plugins.logits_processors": ("a", "b:C")}) == [
        "--plugins.logits-processors=a",
        "--plugins.logits-processors=b:C",
    ]
    assert to_arguments({"plugins.logits_processors": ()}) == []
