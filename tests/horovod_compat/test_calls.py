"""unidist does what Horovod does, call by call, on the same ranks in one job."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from part_pools import PartPools
from tensorflow_ranks import ENVIRONMENT

pytestmark = [pytest.mark.parallel, pytest.mark.slow]
_ENGINES = ["shm", pytest.param("gloo", marks=pytest.mark.soak), pytest.param("mpi", marks=pytest.mark.soak)]


@pytest.mark.parametrize("engine", _ENGINES)
def test_torch(torch_pools: PartPools, compare: Callable[..., list[str]], engine: str) -> None:
    pytest.importorskip("torch")
    assert compare(torch_pools.get(2), "torch_cases", "torch", engine, {}) == []


@pytest.mark.parametrize("engine", _ENGINES)
def test_tensorflow(tensorflow_pools: PartPools, compare: Callable[..., list[str]], engine: str) -> None:
    pytest.importorskip("tensorflow")
    ranks = tensorflow_pools.get(2)
    assert compare(ranks, "tensorflow_cases", "tensorflow", engine, dict(ENVIRONMENT)) == []
