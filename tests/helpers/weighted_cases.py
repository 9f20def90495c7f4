"""Comparisons of trainings with weighted losses, each beside one process; for the tests of every framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

EXACT, FAR = 1e-12, 1e-5

Errors = Sequence[Sequence[float | str]]
"""Of each rank, the largest difference from one process in each case, or the error in words."""


def check(cases: Sequence[Any], found: Errors) -> None:
    """Assert that the cases have the numbers of one process."""
    wrong = {
        case: errors for case, errors in _by_case(cases, found) if not all(_is_below(EXACT, each) for each in errors)
    }
    assert not wrong, "\n".join(f"{case}: {errors}" for case, errors in wrong.items())


def check_far(cases: Sequence[Any], found: Errors) -> None:
    """Assert that the cases have other numbers."""
    wrong = {
        case: errors
        for case, errors in _by_case(cases, found)
        if any(isinstance(each, str) for each in errors) or all(_is_below(FAR, each) for each in errors)
    }
    assert not wrong, "\n".join(f"{case}: {errors}" for case, errors in wrong.items())


def _by_case(cases: Sequence[Any], found: Errors) -> list[tuple[Any, tuple[float | str, ...]]]:
    return list(zip(cases, zip(*found, strict=True), strict=True))


def _is_below(limit: float, error: float | str) -> bool:
    return not isinstance(error, str) and error < limit
