"""The lines of soak.txt are the names of tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak_cases import STALE_LINES


def test_every_line_matches_a_test(pytestconfig: pytest.Config) -> None:
    """In a run of all tests; in others, those lines whose files were collected."""
    assert pytestconfig.stash[STALE_LINES] == []


def test_every_line_is_in_a_file_that_is_there() -> None:
    tests = Path(__file__).parent
    lines = [line for line in (tests / "soak.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not (tests.parent / line.partition("::")[0]).is_file()] == []
