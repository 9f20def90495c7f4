"""Ranks that serve tests of many engines, one after another: starting ranks is what costs, `init()` is not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from unidist.jobs.pool.pool import RankPool
from unidist.settings.environment import set_variables


class EnginePool:
    """A pool whose calls run with one engine chosen; the ranks are also those of other tests, with other engines.

    Args:
        pool: the ranks.
        engine: what `--engine` would say.
    """

    def __init__(self, pool: RankPool, engine: str) -> None:
        self._pool = pool
        self._engine = engine
        self.num_proc = pool.num_proc

    def run(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        per_rank_args: Sequence[Sequence[Any]] | None = None,
        timeout: timedelta | None = None,
    ) -> list[Any]:
        """See `RankPool.run`."""
        chosen = with_engine(func, self._engine)
        return self._pool.run(chosen, args, kwargs, per_rank_args=per_rank_args, timeout=timeout)

    def kill(self, rank: int) -> None:
        """See `RankPool.kill`."""
        self._pool.kill(rank)


def with_engine(function: Callable[..., Any], engine: str) -> Callable[..., Any]:
    """Return the function, which runs with `UNIDIST_ENGINE` set to `engine`."""

    @functools.wraps(function)  # the name goes into messages; the module decides how the function travels
    def call(*args: Any, **kwargs: Any) -> Any:
        with set_variables({"UNIDIST_ENGINE": engine}):
            return function(*args, **kwargs)

    return call
