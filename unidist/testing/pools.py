"""Rank pools that many tests share: starting processes, and importing a framework in them, is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import psutil
from typing_extensions import override

from unidist.jobs.pool.pool import RankPool
from unidist.testing.leaks import Resources
from unidist.testing.rank_state import leaving_nothing


class PoolCache:
    """Keeps one RankPool per number of ranks and environment; use it in a `with` statement.

    A pool in which a call failed is not given out again: its ranks may be in any state. A call that returns and has
    changed a setting of its process fails (`leaving_nothing`): it would be a later call that behaves oddly.

    Args:
        timeout: longest time for one call in a pool.
        max_idle_ranks: pools that are in nobody's hands are ended, the oldest first, above this number of ranks.
        max_idle_memory: the same above this share of the machine's memory, however few ranks hold it; but the pool that
            was given out last stays. Several caches, and processes that run tests side by side, have one each.
    """

    def __init__(
        self,
        *,
        timeout: timedelta = timedelta(seconds=180),
        max_idle_ranks: int = 8,
        max_idle_memory: float = 0.1,
    ) -> None:
        self._timeout = timeout
        self._max_idle_ranks = max_idle_ranks
        self._max_idle_bytes = int(max_idle_memory * psutil.virtual_memory().total)
        self._pools: dict[tuple[object, ...], _WatchedPool] = {}

    def get(self, num_proc: int, *, engine: str | None = None, env: Mapping[str, str] | None = None) -> RankPool:
        """Return a healthy pool of `num_proc` ranks, a new one where there is none. Do not close it.

        Args:
            num_proc: number of ranks.
            engine: see `RankPool`.
            env: see `RankPool`.
        """
        key = (num_proc, engine, *sorted((env or {}).items()))
        pool = self._pools.pop(key, None)
        if pool is not None and not pool.healthy:
            pool.close()
            pool = None
        while sum(item.num_proc for item in self._pools.values()) + num_proc > self._max_idle_ranks and self._pools:
            self._close_oldest()
        self._limit_memory()
        if pool is None:
            before = Resources.held()
            pool = _WatchedPool(num_proc, env=env, timeout=self._timeout, engine=engine)
            pool.resources = frozenset(Resources.held().beyond(before))
        self._pools[key] = pool  # at the end: the most recently used one
        return pool

    @property
    def resources(self) -> set[object]:
        """Keys, as in `Resources.beyond`, of the pools' resources in this process, which are not a test's leaks."""
        return {key for pool in self._pools.values() for key in pool.resources}

    def close(self) -> None:
        """End every pool."""
        while self._pools:
            self._pools.popitem()[1].close()

    def _limit_memory(self) -> None:
        """End the oldest pools while the idle ones hold too much."""
        sizes = [resident_bytes(pool.pids) for pool in self._pools.values()]
        while len(sizes) > 1 and sum(sizes) > self._max_idle_bytes:
            del sizes[0]
            self._close_oldest()

    def _close_oldest(self) -> None:
        self._pools.pop(next(iter(self._pools))).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the memory of processes, shared memory included; what several of them map is counted for each."""
    total = 0
    for pid in pids:
        with suppress(psutil.Error):  # it has ended
            total += psutil.Process(pid).memory_info().rss
    return total


class _WatchedPool(RankPool):
    """A pool that remembers whether anything went wrong in it."""

    healthy = True
    resources: frozenset[object] = frozenset()

    @override
    def run(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        per_rank_args: Sequence[Sequence[Any]] | None = None,
        timeout: timedelta | None = None,
    ) -> list[Any]:
        try:
            return super().run(leaving_nothing(func), args, kwargs, per_rank_args=per_rank_args, timeout=timeout)
        except BaseException:
            self.healthy = False
            raise

    @override
    def kill(self, rank: int, number: int = 9) -> None:
        self.healthy = False
        super().kill(rank, number)

    @override
    def close(self) -> None:
        self.healthy = False
        super().close()
