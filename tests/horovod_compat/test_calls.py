"""unidist does what Horovod does, call by call, on the same ranks in one job."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from part_pools import PartPools
from tensorflow_ranks import ENVIRONMENT

pytestmark = [pytest.mark.parallel, pytest.mark.slow]
_ENGINES = ["shm", pytest.param("gloo", marks=pytest.mark.soak), pytest.param("mpi", marks=pytest.mark.soak)]


@pytest.mark.parametrize("engine", _ENGINES)
def test_torch(torch_pools: PartPools, compare: Callable[..., None], engine: str) -> None:
    pytest.importorskip("torch")
    compare(torch_pools.get(2), "torch_cases", "torch", engine, {})


@pytest.mark.parametrize("engine", _ENGINES)
def test_tensorflow(tensorflow_pools: PartPools, compare: Callable[..., None], engine: str) -> None:
    pytest.importorskip("tensorflow")
    ranks = tensorflow_pools.get(2)
    compare(ranks, "tensorflow_cases", "tensorflow", engine, dict(ENVIRONMENT))


@pytest.mark.soak  # the slowest for what it finds: most of it is TensorFlow's table once more
@pytest.mark.parametrize("engine", _ENGINES)
def test_keras(legacy_ranks: PartPools, compare: Callable[..., None], engine: str) -> None:
    variables = {**ENVIRONMENT, "TF_USE_LEGACY_KERAS": "1"}
    compare(legacy_ranks.get(2), "keras_cases", "tensorflow.keras", engine, variables)


@pytest.fixture(scope="module")
def legacy_ranks() -> Iterator[PartPools]:
    pytest.importorskip("tf_keras")
    pools = PartPools(2, {**ENVIRONMENT, "UNIDIST_HOROVOD_BINDING": "tensorflow", "TF_USE_LEGACY_KERAS": "1"})
    yield pools
    pools.close()
