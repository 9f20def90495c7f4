"""The cache of pools: shared while healthy, replaced after a failure, bounded."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest

from unidist.errors import RemoteError
from unidist.testing.pools import PoolCache, resident_bytes

pytestmark = pytest.mark.parallel


@pytest.fixture
def cache() -> Iterator[PoolCache]:
    with PoolCache(max_idle_ranks=4) as made:
        yield made


def test_a_pool_is_given_out_again_for_the_same_wishes(cache: PoolCache) -> None:
    pool = cache.get(1)
    assert cache.get(1) is pool
    assert cache.get(1, env={"A": "1"}) is not pool
    assert cache.get(1, engine="shm") is not pool


def test_a_pool_in_which_a_call_failed_is_replaced(cache: PoolCache) -> None:
    pool = cache.get(1)
    with pytest.raises(RemoteError):
        pool.run(lambda: 1 // 0)
    fresh = cache.get(1)
    assert fresh is not pool
    assert fresh.run(lambda: 1) == [1]
    assert not psutil.pid_exists(pool.pids[0])


def test_a_pool_with_a_killed_rank_is_replaced(cache: PoolCache) -> None:
    pool = cache.get(2)
    pool.kill(1)
    assert cache.get(2) is not pool


def test_the_oldest_pools_end_when_there_are_too_many_ranks(cache: PoolCache) -> None:
    first, second = cache.get(2), cache.get(1)
    third = cache.get(3)
    assert not any(map(psutil.pid_exists, first.pids))
    assert third.run(os.getpid) == list(third.pids)
    assert second.run(lambda: 1) == [1]


def test_the_oldest_idle_pools_end_when_their_ranks_hold_too_much_memory() -> None:
    def fill(nbytes: int) -> None:
        import sys

        sys.ballast = bytearray(b"x") * nbytes  # type: ignore[attr-defined]  # something that outlives the call

    ballast = 100 << 20
    with PoolCache(max_idle_memory=1) as cache:
        pools = []
        for name in "abc":
            pools.append(cache.get(1, env={"POOL": name}))
            pools[-1].run(fill, (ballast,))
        first, second, third = pools
        assert resident_bytes(second.pids) > ballast
        cache._max_idle_bytes = resident_bytes(second.pids) * 5 // 2
        fourth = cache.get(1, env={"POOL": "d"})
        assert not psutil.pid_exists(first.pids[0])
        assert all(psutil.pid_exists(pool.pids[0]) for pool in (second, third, fourth))
    with PoolCache(max_idle_memory=0) as cache:
        kept, asked = cache.get(1, env={"POOL": "a"}), cache.get(1, env={"POOL": "b"})
        assert kept.run(os.getpid) == list(kept.pids), "whoever asks for two pools gets two"
        assert asked.run(os.getpid) == list(asked.pids)


def test_importing_the_kit_imports_no_framework(cache: PoolCache) -> None:
    def imported() -> list[str]:
        import sys

        import unidist.testing.communicator_conformance
        import unidist.testing.strategy_conformance  # noqa: F401 - what they import is the point

        return [name for name in ("torch", "tensorflow", "keras") if name in sys.modules]

    assert cache.get(1, env={"FRESH": "1"}).run(imported) == [[]]
