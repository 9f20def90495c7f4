"""Sources are a release when version, changelog and fragments agree; fragments can be taken into the changelog."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tools.release import ROOT, fragments_of, problems

MOST = 98
"""Characters in a line of a fragment, which becomes an item of a list."""


@pytest.mark.parametrize(
    ("version", "newest", "fragments", "found"),
    [
        ("0.3.0", "0.3.0", [], []),
        ("0.3.0.dev0", "0.2.0", [], ["between releases", "begins with 0.2.0"]),
        ("0.3.0", "0.2.0", [], ["begins with 0.2.0"]),
        ("0.3.0", "0.3.0", ["+late.fixed.md"], ["+late.fixed.md"]),
    ],
)
def test_what_keeps_sources_from_being_a_release_is_said(
    tmp_path: Path, version: str, newest: str, fragments: list[str], found: list[str]
) -> None:
    for folder in ("unidist", "changelog.d"):
        (tmp_path / folder).mkdir()
    (tmp_path / "unidist/_version.py").write_text(f'__version__ = "{version}"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changes\n\n## [{newest}] - 2026-01-01\n\n## [0.0.1]\n")
    for name in fragments:
        (tmp_path / "changelog.d" / name).write_text("A change.\n")
    told = problems(tmp_path)
    assert len(told) == len(found)
    for line, part in zip(told, found, strict=True):
        assert part in line


def test_each_fragment_is_of_a_kind_that_the_changelog_has_and_fits() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file)["tool"]["towncrier"]
    kinds = {kind["directory"] for kind in settings["type"]}
    assert settings["start_string"] in (ROOT / "CHANGELOG.md").read_text("utf-8")
    others = {path.name for path in (ROOT / "changelog.d").iterdir()} - {path.name for path in fragments_of()}
    assert others <= {*settings["ignore"], ".gitignore"}
    for path in fragments_of():
        match = re.fullmatch(r"\+[a-z0-9-]+\.(\w+)\.md", path.name)
        assert match is not None, f"{path.name}: write +topic.kind.md"
        assert match[1] in kinds, path.name
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            assert len(line) <= MOST, f"{path.name}:{number}: {len(line)} characters"
