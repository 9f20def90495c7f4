"""Every test here must end its threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fail when a test leaves a thread of unidist or of a rank behind."""
    yield
    left = [each.name for each in threading.enumerate() if each.name.startswith(("unidist", "rank-"))]
    assert not left
