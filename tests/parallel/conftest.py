"""Tests over several processes: none may leave anything behind."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _nothing_stays(leak_check: None) -> None:
    """Every test here is checked for leaks."""
