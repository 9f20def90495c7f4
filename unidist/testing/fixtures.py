"""The fixtures of the test kit. Put `pytest_plugins = ["unidist.testing.fixtures"]` into the conftest of your tests.

`rank_pool(4)` gives a `RankPool` of 4 ranks, shared by all tests of the session. `leak_check` makes a test fail
that leaves anything behind; use it on everything with `pytestmark = pytest.mark.usefixtures("leak_check")`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import pytest

from unidist.jobs.pool.pool import RankPool
from unidist.testing.leaks import Resources, leaked_since
from unidist.testing.pools import PoolCache


class RankPoolFactory(Protocol):
    """The type of the fixture `rank_pool`."""

    def __call__(self, num_proc: int, *, engine: str | None = None, env: Mapping[str, str] | None = None) -> RankPool:
        """Return a pool of `num_proc` ranks, see `PoolCache.get`."""


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[PoolCache]:
    """All pools of the session; they end with it."""
    with PoolCache() as cache:
        yield cache


@pytest.fixture
def rank_pool(rank_pools: PoolCache) -> RankPoolFactory:
    """A function that returns a pool of ranks, started when first asked for and used again by later tests."""
    return rank_pools.get


@pytest.fixture
def leak_check(rank_pools: PoolCache) -> Iterator[None]:
    """Fail the test if it leaves a process, thread, descriptor, shared memory or changed environment behind."""
    before = Resources.held()
    yield
    leaks = leaked_since(before, allowed=rank_pools.resources)
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)
