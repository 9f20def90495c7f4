"""The tests of the Horovod adapter need Horovod with a binding; none may leave anything behind."""

from __future__ import annotations

import pytest

from unidist_horovod.engine import HorovodEngine


@pytest.fixture(autouse=True)
def _needs_horovod() -> None:
    """Skip, with how to get it, where Horovod cannot be used."""
    available = HorovodEngine().availability()
    if not available.usable:
        pytest.skip(available.reason)


@pytest.fixture(autouse=True)
def _nothing_stays(leak_check: None) -> None:
    """Every test here is checked for leaks."""
