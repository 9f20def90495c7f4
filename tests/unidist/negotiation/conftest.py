"""Every test here must end its threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fail when a test leaves a thread of unidist or of a rank behind."""
    before = set(threading.enumerate())
    yield
    threads = set(threading.enumerate()) - before
    left = [each.name for each in threads if each.name.startswith(("unidist", "rank-"))]
    assert not left
