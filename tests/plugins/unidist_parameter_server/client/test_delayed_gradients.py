"""Gradients that are a few updates old are stable up to the learning rate that theory gives, and not above."""

from __future__ import annotations

import pytest

from benchmarks.delayed_gradients import grows, limit

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_the_servers_keep_to_the_limit_of_delayed_gradients(delay: int) -> None:
    assert not grows(delay + 1, 0.94 * limit(delay), updates=200)
    assert grows(delay + 1, 1.06 * limit(delay), updates=200)
