"""One pool of ranks that serves every smaller number of ranks: importing a framework in ranks is what costs."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest
from tensorflow_ranks import ENVIRONMENT

from unidist.jobs.pool.pool import RankPool
from unidist.jobs.processes import rank_variables
from unidist.runtime import context
from unidist.settings.environment import set_variables
from unidist.testing.pools import PoolCache
from unidist.topology import Topology


class PartPools:
    """Gives out the first ranks of one pool, each time as the whole world of a job of its own.

    What a framework or an engine keeps in a process stays from call to call, whatever the number of ranks. As in a
    `PoolCache`, a pool in which a call failed is not used again.

    Args:
        num_proc: the most ranks that a test may ask for.
        env: variables of the ranks.
    """

    def __init__(self, num_proc: int, env: Mapping[str, str]) -> None:
        self.num_proc = num_proc
        self._env = dict(env)
        self._cache = PoolCache()

    def get(self, num_proc: int, *, engine: str | None = None, env: Mapping[str, str] | None = None) -> PartOfPool:
        """Return the first `num_proc` ranks.

        Args:
            num_proc: number of ranks.
            engine: what `--engine` would say.
            env: variables on top of the pool's, set during each call: none that a framework reads when it is imported.
        """
        if not 1 <= num_proc <= self.num_proc:
            raise ValueError(f"asked for {num_proc} ranks of a pool of {self.num_proc}; give the pool more of them")
        chosen = {} if engine is None else {"UNIDIST_ENGINE": engine}
        whole = self._cache.get(self.num_proc, env=self._env)
        return PartOfPool(whole, num_proc, {**(env or {}), **chosen})

    @property
    def resources(self) -> set[object]:
        """See `PoolCache.resources`."""
        return self._cache.resources

    def close(self) -> None:
        """End the ranks."""
        self._cache.close()


@pytest.fixture(scope="session")
def tensorflow_pools() -> Iterator[PartPools]:
    """Up to 4 ranks for TensorFlow, started when first asked for; PyTorch may be in them too."""
    # One binding of Horovod: what a rank has imported depends on the tests before, and ranks that differ do not meet.
    pools = PartPools(4, {**ENVIRONMENT, "UNIDIST_HOROVOD_BINDING": "tensorflow"})
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def jax_pools() -> Iterator[PartPools]:
    """Up to 4 ranks for JAX, which computes in float64 where asked to."""
    pools = PartPools(
        4, {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", "UNIDIST_TIMEOUT_SEC": "60"}
    )
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def torch_pools() -> Iterator[PartPools]:
    """Up to 4 ranks for PyTorch, likewise."""
    pools = PartPools(4, {"OMP_NUM_THREADS": "1", "UNIDIST_TIMEOUT_SEC": "60"})
    yield pools
    pools.close()


class PartOfPool:
    """The first ranks of a pool, with the interface of `RankPool` as far as the tests use it.

    Args:
        whole: the pool. Its other ranks have nothing to do meanwhile.
        num_proc: number of ranks.
        variables: for each call.
    """

    def __init__(self, whole: RankPool, num_proc: int, variables: Mapping[str, str]) -> None:
        self._whole = whole
        self._variables = variables
        self.num_proc = num_proc

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
        own = [()] * self.num_proc if per_rank_args is None else per_rank_args
        if len(own) != self.num_proc:
            raise ValueError(f"arguments of {len(own)} ranks for {self.num_proc}")
        calls = [(True, *args, *each) for each in own]
        idle = [(False,)] * (self._whole.num_proc - self.num_proc)
        part = as_first_ranks(func, self.num_proc, self._variables)
        return self._whole.run(part, (), kwargs, per_rank_args=[*calls, *idle], timeout=timeout)[: self.num_proc]


def as_first_ranks(function: Callable[..., Any], num_proc: int, variables: Mapping[str, str]) -> Callable[..., Any]:
    """Return the function, which finds itself in a new job of `num_proc` ranks; the others do not call it.

    Its first argument says whether this rank is one of them.
    """
    job = f"part-{secrets.token_hex(8)}"

    @functools.wraps(function)  # the name goes into messages; the module decides how the function travels
    def call(takes_part: bool, *args: Any, **kwargs: Any) -> Any:
        if not takes_part:
            return None
        _leave_imports_alone()
        rank = int(os.environ["UNIDIST_RANK"])
        place = Topology(rank=rank, world_size=num_proc, local_rank=rank, local_size=num_proc)
        # Not all ranks have called init() equally often, nor made as many layers and optimizers: names have numbers.
        context._epochs = itertools.count()
        if (keras := sys.modules.get("keras")) is not None:
            keras.utils.clear_session(free_memory=False)  # which makes Keras forget the policy of an earlier test, too
        if (adasum := sys.modules.get("unidist_torch.training.adasum_optimizer")) is not None:
            adasum._numbers = itertools.count()
        with set_variables({**rank_variables(place), "UNIDIST_JOB_ID": job, **variables}):
            try:
                return function(*args, **kwargs)
            finally:
                if (keras := sys.modules.get("keras")) is not None:
                    keras.config.set_floatx("float32")
                _forget_programs()

    return call


_CALLS_WITH_PROGRAMS = 40
_num_calls = itertools.count(1)


def _forget_programs() -> None:
    """Forget what JAX has compiled and TensorFlow traced now and then: it stays in memory, and no test needs it."""
    if {"jax", "tensorflow"} & sys.modules.keys() and next(_num_calls) % _CALLS_WITH_PROGRAMS == 0:
        if (jax := sys.modules.get("jax")) is not None:
            jax.clear_caches()
        gc.collect()


_frozen: set[str] = set()
"""The frameworks whose objects this rank's collector does not look at."""


def _leave_imports_alone() -> None:
    """Let the collector look at what tests make, and not at each framework: they are half a million objects.

    Every start of a runtime after many, and every test of what stays behind, asks the collector to look at everything.
    """
    if new := {"keras", "tensorflow", "torch"} & sys.modules.keys() - _frozen:
        _frozen.update(new)
        gc.collect()
        gc.freeze()
