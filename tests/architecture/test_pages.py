"""The reference pages say what the code says."""

import re
import tomllib
from pathlib import Path

import pytest

from gpu_worker.config import WorkerConfig
from tests.architecture.reference_pages import filled, pages, section_tables
from tests.architecture.sources import ROOT, files

LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
NAMED = re.compile(r"`((?:protos|plugins|control_plane|gpu_worker|tests|helm|docs|benchmarks)/[^`*{ ]*)`")


@pytest.mark.parametrize("path", ["docs/metrics.md", "docs/configuration.md"])
def test_a_reference_page_is_up_to_date(path: str) -> None:
    page = (ROOT / path).read_text(encoding="utf-8")

    assert page == pages()[path]  # else: make generate


def test_every_key_says_what_it_means() -> None:
    tables = pages()["docs/configuration.md"]

    assert [line for line in tables.splitlines() if line.endswith("|  |")] == []


def test_a_changed_default_changes_its_page() -> None:
    page = "<!-- tables: sections -->\n\nold\n\n<!-- end -->\nrest"

    assert "| `port` | `50061` |" in filled(page, {"tables: sections": section_tables({"worker": WorkerConfig})})
    assert "old" not in filled(page, {"tables: sections": "new"})


PAGES = [path for path in files() if path.suffix == ".md"]


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_every_file_that_a_page_names_exists(path: Path) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")

    assert [named for named in NAMED.findall(text) if not (ROOT / named).exists()] == []


def test_the_readme_leads_to_every_page_of_the_docs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert {str(path) for path in PAGES if path.parts[0] == "docs"} - set(LINK.findall(text)) == set()


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_every_link_of_a_page_leads_to_a_file(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")

    assert [link for link in LINK.findall(text) if not (ROOT / path).parent.joinpath(link).exists()] == []


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    names = {re.split(r"[<>=,]", requirement)[0] for requirement in requirements}
    page = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")

    assert {name for name in names if f"`{name}`" not in page} == set()
