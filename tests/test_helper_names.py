"""Helpers of tests are imported by their names alone, so each name is that of one file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

_TESTS = Path(__file__).parent
_ALONE = ("unidist_jax", "examples")
"""Folders whose tests run in an environment of their own, or that run their helpers as scripts."""


def test_no_two_helpers_have_one_name() -> None:
    files = [*_TESTS.rglob("_*.py"), *(_TESTS / "helpers").glob("*.py")]
    named = [each for each in files if each.name != "__init__.py" and not {*_ALONE, "third_party"} & {*each.parts}]
    assert len(named) > 50
    assert [name for name, count in Counter(each.name for each in named).items() if count > 1] == []
