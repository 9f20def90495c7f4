"""Data parallelism, plain and accumulating, gives the numbers of one process on every engine."""

from __future__ import annotations

import numpy as np
import pytest
from part_pools import PartPools

from unidist.testing import StrategyConformance
from unidist.testing._training import Training, train_on_rank
from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the training is in PyTorch")
pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return torch_pools


class TestDataParallelOverShm(StrategyConformance):
    engine = "shm"


class TestDataParallelOverGloo(StrategyConformance):
    engine = "gloo"
    sizes = (2, 3)
    optimizers = ("adamw",)


class TestWithoutOverlap(StrategyConformance):
    strategy = "data:overlap=false"
    sizes = (3,)


class TestManySmallBuckets(StrategyConformance):
    strategy = "data:bucket_mb=0.001"
    sizes = (3,)


class TestAccumulatingTheMean(StrategyConformance):
    strategy = "accumulate=4"
    passes = 4
    sizes = (1, 2, 3)


class TestAccumulatingTheSum(StrategyConformance):
    strategy = "accumulate=4:reduction=sum"
    passes = 4
    loss_factor = 4.0  # the sum over four passes is four times their mean
    sizes = (2,)


class TestAccumulatingOverGloo(StrategyConformance):
    engine = "gloo"
    strategy = "accumulate=4"
    passes = 4
    sizes = (3,)
    optimizers = ("adamw",)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_short_last_window_is_applied_by_flush(rank_pool: RankPoolFactory, reduction: str) -> None:
    # Ten passes by four: two whole windows and one of two passes.
    training = Training("sgd", steps=10, passes=4, flush=True)
    strategy = f"accumulate=4:reduction={reduction}"
    outcome = rank_pool(2).run(train_on_rank, ("torch", strategy, "shm", training))[0]
    expected = rank_pool(1).run(_windows, (training, [4, 4, 2], reduction))[0]
    for name, value in expected.items():
        tolerance = 1e-5 if value.dtype == np.float32 else 1e-12
        np.testing.assert_allclose(outcome.parameters[name], value, rtol=0, atol=tolerance, err_msg=name)
    unflushed = rank_pool(2).run(train_on_rank, ("torch", strategy, "shm", Training("sgd", steps=10, passes=4)))[0]
    assert np.abs(unflushed.parameters["head"] - expected["head"]).max() > 1e-6


def test_nothing_is_exchanged_inside_a_window(rank_pool: RankPoolFactory) -> None:
    def operations(strategy: str, steps: int) -> int:
        arguments = ("torch", strategy, "shm", Training("sgd", steps=steps))
        outcomes = rank_pool(2).run(train_on_rank, arguments, {"record": True})
        counts = {len(outcome.operations) for outcome in outcomes}
        assert len(counts) == 1, "the ranks exchanged differently"
        return counts.pop()

    start = operations("accumulate=4", 0)  # agreeing on the parameters
    assert operations("accumulate=4", 3) == start
    per_update = operations("accumulate=4", 4) - start
    assert per_update > 0
    assert operations("accumulate=4", 7) == start + per_update
    assert operations("accumulate=4", 8) == start + 2 * per_update
    assert operations("", 8) == start + 8 * per_update


def _windows(training: Training, windows: list[int], reduction: str) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    """Train in one process, with windows of these numbers of batches; each window's gradient is a mean or a sum."""
    import torch

    from unidist_torch.training import conformance

    model = conformance.Model()
    optimizer = conformance._optimizer(training.optimizer, model)
    features, labels = training.data(conformance._WIDTH, conformance._CLASSES)
    start = 0
    for window in windows:
        stop = start + window * training.batch
        inputs, targets = torch.from_numpy(features[start:stop]), torch.from_numpy(labels[start:stop])
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets) + model.narrow_loss(inputs)
        (loss * (window if reduction == "sum" else 1)).backward()
        optimizer.step()
        start = stop
    return {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
