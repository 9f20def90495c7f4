"""The list of pages for programs, and the page for agents, say what is there."""

from __future__ import annotations

import re

from tools import llms


def test_the_list_of_pages_is_that_of_the_documentation() -> None:
    assert llms.OUT.read_text(encoding="utf-8") == llms.text(), "run: python -m tools.llms"


def test_every_link_leads_to_a_page_and_every_guide_is_listed() -> None:
    linked = re.findall(r"\]\((docs/[^)]+)\)", llms.text())
    assert [path for path in linked if not (llms.ROOT / path).exists()] == []
    pages = {str(path.relative_to(llms.ROOT)) for path in (llms.ROOT / "docs").glob("*.md")}
    assert pages <= set(linked)


def test_the_commands_for_agents_are_targets_of_make() -> None:
    named = set(re.findall(r"make ([a-z-]+)", (llms.ROOT / "AGENTS.md").read_text(encoding="utf-8")))
    targets = set(re.findall(r"^([a-z-]+):", (llms.ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"test", "check", "format"} <= named <= targets
