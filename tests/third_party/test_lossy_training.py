"""What differs from one process by design keeps what it does promise, and the suite notices if it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from part_pools import PartPools

from unidist.buffer import DType
from unidist.testing import CompressorConformance, Quadratic, RankOutcome, StrategyConformance, Training
from unidist.testing._training import descend_on_rank
from unidist.testing.fixtures import RankPoolFactory


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


class TestSampleSigns(CompressorConformance):
    compressor = "sample-signs"
    compresses = (DType.FLOAT32,)
    error = 0.9


class _Lossy(StrategyConformance):
    exact = False
    sizes = (1, 2, 3)
    optimizers = ("adamw",)


@pytest.mark.parallel
class TestTrainingWithSampleSigns(_Lossy):
    strategy = "data:compression=sample-signs/gain=0.5"
    common_optimum = True  # between two optima signs cancel each other out
    quadratic_error = 0.2


@pytest.mark.parallel
class TestTrainingWithPowerSGD(_Lossy):
    strategy = "data:compression=powersgd/rank=2/warmup=0"


@pytest.mark.parallel
class TestTrainingWithFloat16(_Lossy):
    strategy = "data:compression=fp16,accumulate=2"
    passes = 2


@pytest.mark.parallel
class TestTrainingOfNumpyWithPowerSGD(_Lossy):
    framework = "numpy"
    strategy = "data:compression=powersgd/rank=2"
    optimizers = ("sgd",)
    sizes = (2,)


@pytest.mark.parallel
class TestLocalSGD(_Lossy):
    strategy = "local-sgd=4,accumulate=2"
    passes = 2
    equal_every = 4
    sizes = (1, 2, 4)  # powers of two: the mean of equal numbers is that number
    common_optimum = True  # else it finds a point between, which depends on the learning rate


@pytest.mark.parallel
class TestLocalSGDOnKeras(_Lossy):
    framework = "tensorflow"
    strategy = "local-sgd=4"
    equal_every = 4
    sizes = (2,)
    optimizers = ("sgd",)
    common_optimum = True


@pytest.mark.parallel
class TestLocalSGDOnNumpy(_Lossy):
    framework = "numpy"
    strategy = "local-sgd=5,clip_norm=100"
    equal_every = 5
    sizes = (2,)
    optimizers = ("sgd",)
    common_optimum = True


class Suite(_Lossy):
    """The suite of a strategy that came to these outcomes."""

    outcomes: ClassVar[list[RankOutcome]] = []

    def trained(self, size: int, training: Training) -> list[RankOutcome]:
        return self.outcomes

    def descend(self, size: int) -> list[RankOutcome]:
        return self.outcomes


def outcomes(*shifts: float, steps: int = 10) -> list[RankOutcome]:
    """Return the outcome of ranks that are so far from the minimum."""
    terms = [Quadratic().terms(rank) for rank in range(len(shifts))]
    optimum = sum(c * t for t, c in terms) / sum(c for _, c in terms)
    numbers = tuple(range(1, steps + 1))
    return [RankOutcome({"weights": np.asarray(optimum + shift)}, steps=numbers) for shift in shifts]


FAULTS: list[tuple[list[RankOutcome], Callable[[Suite], Any], str]] = [
    (outcomes(0.0, 1e-9), lambda suite: suite.test_many_updates_leave_the_ranks_equal(2), "0 and 1 have drifted apart"),
    (
        outcomes(0.0, 1e-9),
        lambda suite: suite.test_parameters_are_the_same_bits_on_every_rank(2, "sgd", ""),
        "differs between ranks",
    ),
    (
        outcomes(0.3, 0.3),
        lambda suite: suite.test_it_finds_the_minimum_of_a_quadratic_function(2),
        "from the minimum, more than",
    ),
    (
        outcomes(0.0, 0.0, steps=9),
        lambda suite: suite.test_updates_are_counted_on_every_rank(2, "sgd", ""),
        "10 updates; rank 0 was told of",
    ),
]


@pytest.mark.parametrize(("found", "case", "message"), FAULTS, ids=[message for *_, message in FAULTS])
def test_a_broken_promise_is_found(found: list[RankOutcome], case: Callable[[Suite], Any], message: str) -> None:
    suite = Suite()
    suite.outcomes = outcomes(0.0, 0.0)  # type: ignore[misc]  # of this instance
    case(suite)
    suite.outcomes = found  # type: ignore[misc]
    with pytest.raises(AssertionError, match=message):
        case(suite)


def descend_apart(framework: str) -> Any:
    import unidist_torch.training.conformance as module

    honest, module.distribute = module.distribute, lambda model, optimizer: (model, optimizer)  # type: ignore[assignment]
    try:
        return descend_on_rank(framework, "", "shm", Quadratic(20))
    finally:
        module.distribute = honest


@pytest.mark.parallel
def test_ranks_that_train_apart_are_found(rank_pool: RankPoolFactory) -> None:
    suite = Suite()
    suite.outcomes = rank_pool(2).run(descend_apart, ("torch",))  # type: ignore[misc]
    with pytest.raises(AssertionError, match="drifted apart"):
        suite.test_many_updates_leave_the_ranks_equal(2)
    with pytest.raises(AssertionError, match="from the minimum"):
        suite.test_it_finds_the_minimum_of_a_quadratic_function(2)
