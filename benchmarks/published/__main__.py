"""`python -m benchmarks.published`: write docs/published.md and docs/published.svg (seconds)."""

from __future__ import annotations

from pathlib import Path

from benchmarks.published import page

DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    """Write both files."""
    (DOCS / "published.md").write_text(page.markdown(), encoding="utf-8")
    (DOCS / "published.svg").write_text(page.svg(), encoding="utf-8")


main()
