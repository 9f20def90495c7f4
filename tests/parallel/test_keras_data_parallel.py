"""Data parallelism, plain and accumulating, gives the numbers of one process in TensorFlow, however a step is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from part_pools import PartPools

from unidist.testing import StrategyConformance
from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("tensorflow", reason="the training is in Keras")
pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return tensorflow_pools


class KerasConformance(StrategyConformance):
    framework = "tensorflow"
    modes = ("eager", "function", "fit")
    sizes = (2,)  # other numbers, and other engines, are in test_training_parity


class TestKerasDataParallel(KerasConformance):
    pass


class TestKerasAccumulatingTheMean(KerasConformance):
    strategy = "accumulate=4"
    passes = 4
    optimizers = ("adamw",)


class TestKerasAccumulatingTheSum(KerasConformance):
    strategy = "accumulate=4:reduction=sum"
    passes = 4
    loss_factor = 4.0  # the sum over four passes is four times their mean
    optimizers = ("sgd",)  # Adam's updates are the same


def _train(load_from: str | None, save_to: str | None, first: int, steps: int) -> tuple[list[float], list[Any]]:
    """Train on this rank's share of each batch; return the losses over the whole batches, and the weights."""
    import keras

    import unidist.keras as ud

    ud.init()
    try:
        keras.utils.set_random_seed(0 if load_from is None else 9)  # what is loaded must not have been there before
        layers = [keras.layers.Dense(7, activation="tanh", dtype="float64"), keras.layers.Dense(1, dtype="float64")]
        model = keras.Sequential([keras.Input((5,), dtype="float64"), *layers])
        model, optimizer = ud.distribute(model, keras.optimizers.AdamW(0.05))
        model.compile(optimizer, "mse", jit_compile=False)
        if load_from is not None:
            loaded = ud.load(load_from, model, optimizer)
            assert loaded.extra["next_step"] == first
        losses = []
        for step in range(first, first + steps):
            inputs = np.random.default_rng(step).normal(size=(8, 5))
            targets = inputs.sum(1, keepdims=True)
            losses.append(float(np.square(model(inputs) - targets).mean()))
            model.train_on_batch(inputs[ud.rank() :: ud.size()], targets[ud.rank() :: ud.size()])
        if save_to is not None:
            ud.save(save_to, model, optimizer, extra={"next_step": first + steps})
        return losses, [weight.numpy() for weight in model.weights]
    finally:
        ud.shutdown()


def test_a_checkpoint_of_two_ranks_goes_on_in_one_and_back(rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    losses, weights = rank_pool(1).run(_train, (None, None, 0, 9))[0]
    rank_pool(2).run(_train, (None, str(tmp_path / "a"), 0, 3))
    rank_pool(1).run(_train, (str(tmp_path / "a"), str(tmp_path / "b"), 3, 3))
    for continued, reached in rank_pool(2).run(_train, (str(tmp_path / "b"), None, 6, 3)):
        np.testing.assert_allclose(continued, losses[6:], rtol=0, atol=1e-10)
        for found, expected in zip(reached, weights, strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
    assert min(losses[6:]) < 0.9 * losses[0]  # it does train
