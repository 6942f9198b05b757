"""How a class is found by the name that a configuration gives it."""

import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

import pytest

from plugins.classes import entry_point_names, find_class
from plugins.errors import InvalidConfig

GROUP = "dihedral.test_shapes"


class Shape(ABC):
    @abstractmethod
    def area(self) -> float: ...


class Square(Shape):
    def area(self) -> float:
        return 1.0

    class Inner(Shape):
        def area(self) -> float:
            return 0.25


class Unfinished(Shape):
    pass


def find(name: str) -> type[Shape]:
    base: type[Shape] = Shape  # type: ignore[type-abstract]  # to be derived from, not to be built
    return find_class(name, GROUP, base, "shape.kind", builtin=("circle",))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path with a distribution `shapes` 1.2 in it."""
    info = tmp_path / "shapes-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shapes\nVersion: 1.2\n")
    (info / "top_level.txt").write_text("planted_broken\n")
    (info / "entry_points.txt").write_text(
        f"[{GROUP}]\nsquare = tests.unit.plugins.test_classes:Square\nbroken = planted_broken:Triangle\n"
        "text = tests.unit.plugins.test_classes:GROUP\n"
    )
    (tmp_path / "planted_broken.py").write_text("import planted_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("install")
def test_an_entry_point_is_found_by_its_name() -> None:
    assert find("square") is Square
    assert entry_point_names(GROUP) == ("broken", "square", "text")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("tests.unit.plugins.test_classes:Square", Square),
        ("tests.unit.plugins.test_classes.Square", Square),
        ("tests.unit.plugins.test_classes:Square.Inner", Square.Inner),
    ],
)
def test_a_class_is_found_by_its_place(name: str, found: type[Shape]) -> None:
    assert find(name) is found


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(InvalidConfig) as caught:
        find("pentagon")

    assert str(caught.value) == (
        "unknown shape.kind 'pentagon'; known: circle; or name a class as pkg.mod:Class "
        "(entry-point group dihedral.test_shapes)"
    )


@pytest.mark.usefixtures("install")
def test_the_known_names_are_those_of_entry_points_too() -> None:
    with pytest.raises(InvalidConfig, match="known: broken, circle, square, text;"):
        find("pentagon")


def test_a_group_without_names_says_none() -> None:
    with pytest.raises(InvalidConfig, match="known: <none>;"):
        find_class("pentagon", GROUP, Square, "shape.kind")


@pytest.mark.parametrize("name", ["", "a b.C", ".Square", "pkg.", "pkg:", "pkg:a:b", "pkg..mod:C", "a/b.py:C"])
def test_what_names_no_place_is_an_unknown_name(name: str) -> None:
    with pytest.raises(InvalidConfig, match="unknown shape.kind"):
        find(name)


@pytest.mark.usefixtures("install")
def test_a_plugin_that_cannot_be_imported_names_itself_its_distribution_the_error_and_the_remedy() -> None:
    with pytest.raises(InvalidConfig) as caught:
        find("broken")

    assert str(caught.value) == (
        "shape.kind 'broken' (planted_broken:Triangle of shapes 1.2) cannot be loaded: ModuleNotFoundError: "
        "No module named 'planted_dependency'; install what it needs, or install a version of shapes that fits"
    )


@pytest.mark.usefixtures("install")
def test_a_place_in_a_distribution_names_that_distribution() -> None:
    with pytest.raises(InvalidConfig, match=r"'planted_broken.Triangle' \(planted_broken.Triangle of shapes 1.2\)"):
        find("planted_broken.Triangle")


def test_a_module_that_does_not_exist_may_be_one_of_the_current_folder() -> None:
    with pytest.raises(InvalidConfig) as caught:
        find("planted_nowhere.mod:Class")

    assert str(caught.value) == (
        "shape.kind 'planted_nowhere.mod:Class' (planted_nowhere.mod:Class of no installed distribution) cannot be "
        "loaded: ModuleNotFoundError: No module named 'planted_nowhere'; install the package that has "
        "'planted_nowhere', or correct the name; a module of the current folder is found with PYTHONPATH=."
    )


def test_a_module_without_the_class_says_so() -> None:
    with pytest.raises(InvalidConfig) as caught:
        find("tests.unit.plugins.test_classes:Circle")

    assert str(caught.value).endswith(
        "AttributeError: module 'tests.unit.plugins.test_classes' has no attribute 'Circle'; "
        "correct the name, or correct the module"
    )


@pytest.mark.parametrize("line", ["raise ValueError('no key')", "import json; json.nothing", "raise SystemExit(0)"])
def test_a_module_that_raises_is_told_from_one_that_lacks_the_class(install: Path, line: str) -> None:
    (install / "planted_raising.py").write_text(f"{line}\n")

    with pytest.raises(InvalidConfig, match="its module raised this while it was imported; set up what it wants, or"):
        find("planted_raising:Class")


def test_a_hook_has_the_name_that_its_user_gives_it() -> None:
    with pytest.raises(InvalidConfig, match="must be a subclass of any shape of ours"):
        find_class("tests.unit.plugins.test_classes:GROUP", GROUP, object, "shape.kind", hook="any shape of ours")


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize("name", ["text", "pathlib:Path", "tests.unit.plugins.test_classes:find"])
def test_what_is_no_class_of_the_hook_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfig, match=r"must be a subclass of tests.unit.plugins.test_classes.Shape"):
        find(name)


def test_a_class_with_methods_missing_is_refused_before_it_is_built() -> None:
    with pytest.raises(InvalidConfig, match="Unfinished must define area, as .*test_classes.Shape describes"):
        find("tests.unit.plugins.test_classes:Unfinished")


def test_a_name_that_two_distributions_claim_is_refused(install: Path) -> None:
    other = install / "others-3.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 3.0\n")
    (other / "entry_points.txt").write_text(f"[{GROUP}]\nsquare = others:Square\n")

    with pytest.raises(InvalidConfig, match="claimed by others 3.0 and shapes 1.2; uninstall all but one"):
        find("square")


def test_nothing_is_imported_until_it_is_asked_for(install: Path) -> None:
    source = f"import sys, plugins.classes as c; c.entry_point_names({GROUP!r}); print('planted_broken' in sys.modules)"
    command = [sys.executable, "-c", source]

    run = subprocess.run(command, env={"PYTHONPATH": f"{Path.cwd()}:{install}"}, capture_output=True, text=True)

    assert run.stdout == "False\n", run.stderr
