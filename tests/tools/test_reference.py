"""The hook by which the API reference shows everything that is public."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.reference import ROOT, on_config, on_page_markdown, public_modules, repository, shown_by_hand
from unidist._version import __version__

LISTED = '"""A text."""\n\n__all__ = ["name", "beside"]\n'


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def on_page(path: str) -> str:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=path))
    return on_page_markdown("# Title", page=page, config=None, files=None)


def test_the_site_has_the_version_and_the_repository() -> None:
    config: dict[str, str | None] = {}
    on_config(config)
    assert config["site_name"] == f"unidist {__version__}"
    text = "[metadata]\nname = x\nproject_urls =\n    Repository = https://host/us/it\n    Other = https://o\n"
    assert repository(text) == "https://host/us/it"
    assert repository("[metadata]\nname = x\n") is None


def test_the_navigation_begins_with_few_entries_and_the_home_page_with_the_installation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    top = [line for line in text.partition("\nnav:\n")[2].splitlines() if line.startswith("  - ")]
    assert 5 < len(top) < 20
    assert "navigation.sections" not in text  # which would show the entries of all sections as well
    home = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert home.index("pip install ") < home.index("![") < home.index("## ")


def test_public_is_what_lists_names_and_what_is_listed(tmp_path: Path) -> None:
    write(tmp_path / "mine" / "__init__.py", LISTED)
    write(tmp_path / "mine" / "beside.py", '"""A text."""\n')
    write(tmp_path / "mine" / "contract.py", LISTED)
    write(tmp_path / "mine" / "other.py", '"""A text."""\n')
    write(tmp_path / "mine" / "part" / "__init__.py", LISTED)
    write(tmp_path / "mine" / "_half" / "__init__.py", LISTED)
    write(tmp_path / "mine" / "silent" / "__init__.py", '"""A text."""\n')
    assert public_modules(tmp_path) == ["mine", "mine.beside", "mine.contract", "mine.part"]


@pytest.mark.parametrize(("path", "name"), [("plugins", "unidist_zero"), ("launch", "unidist_launch.observers")])
def test_a_page_of_an_area_lists_its_packages(path: str, name: str) -> None:
    assert f"\n::: {name}\n" in on_page(f"reference/{path}.md")


def test_the_first_page_of_the_core_has_what_no_page_names() -> None:
    by_hand = shown_by_hand(ROOT / "docs" / "reference")
    assert "unidist.strategy" in by_hand
    assert "::: unidist.strategy\n" not in on_page("reference/core.md")
    added = {line.removeprefix("::: ") for line in on_page("reference/core.md").splitlines() if line.startswith(":::")}
    left = set(public_modules(ROOT, "unidist")) - by_hand - added
    assert {name.split(".")[1] for name in left} <= {"torch", "tensorflow", "keras", "jax"}


def test_other_pages_stay_as_they_are() -> None:
    assert on_page("zero.md") == "# Title"
