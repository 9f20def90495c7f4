"""The tests of the Horovod adapter need Horovod with a binding; none may leave anything behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from horovod_bindings import ENVIRONMENTS
from part_pools import PartOfPool, PartPools

from unidist_horovod.engine import HorovodEngine


class HorovodPools:
    """Ranks for each of Horovod's bindings: a process stays with its first one."""

    def __init__(self) -> None:
        self._pools = {name: PartPools(4, env) for name, env in ENVIRONMENTS.items()}

    def get(self, num_proc: int, *, engine: str | None = None, env: Mapping[str, str] | None = None) -> PartOfPool:
        """Return the first `num_proc` ranks of those for the binding that `env` names; PyTorch's otherwise."""
        binding = (env or {}).get("UNIDIST_HOROVOD_BINDING", "torch")
        return self._pools[binding].get(num_proc, engine=engine, env=env)

    @property
    def resources(self) -> set[object]:
        """See `PoolCache.resources`."""
        return {each for pools in self._pools.values() for each in pools.resources}

    def close(self) -> None:
        """End the ranks."""
        for pools in self._pools.values():
            pools.close()


_pools = HorovodPools()


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[HorovodPools]:
    """The ranks of this folder."""
    yield _pools
    _pools.close()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the ranks after the last test of this folder: other folders need the memory."""
    if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
        _pools.close()


@pytest.fixture(autouse=True)
def _needs_horovod() -> None:
    """Skip, with how to get it, where Horovod cannot be used."""
    available = HorovodEngine().availability()
    if not available.usable:
        pytest.skip(available.reason)


@pytest.fixture(autouse=True)
def _nothing_stays(leak_check: None) -> None:
    """Every test here is checked for leaks."""
