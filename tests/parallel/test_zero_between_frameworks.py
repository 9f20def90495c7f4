"""What ZeRO has trained in one framework goes on under ZeRO in the other, at another stage and number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from part_pools import PartPools

from unidist.settings.environment import set_variables
from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the training is in PyTorch and in Keras")
pytest.importorskip("tensorflow", reason="the training is in PyTorch and in Keras")
pytestmark = [pytest.mark.parallel, pytest.mark.soak]

BATCH, STEPS = 12, 3
LONG = timedelta(seconds=300)
TO_KERAS: dict[str, Any] = {
    "sequential/dense/kernel": {"from": "0.weight", "permute": [1, 0]},
    "sequential/dense/bias": "0.bias",
    "sequential/dense_1/kernel": {"from": "2.weight", "permute": [1, 0]},
    "sequential/dense_1/bias": "2.bias",
}
TO_TORCH: dict[str, Any] = {
    "0.weight": {"from": "sequential/dense/kernel", "permute": [1, 0]},
    "0.bias": "sequential/dense/bias",
    "2.weight": {"from": "sequential/dense_1/kernel", "permute": [1, 0]},
    "2.bias": "sequential/dense_1/bias",
}
# Options that float32 has exactly: Keras rounds them to it, whatever the type of the weights.
RATE, BETAS, EPSILON, DECAY = 2**-6, (0.875, 0.96875), 1e-12, 0.125


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return tensorflow_pools


@contextmanager
def started(ud: Any, strategy: str) -> Iterator[None]:
    """Let unidist run with a strategy."""
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            yield
        finally:
            ud.shutdown()


def batch(step: int) -> np.ndarray[Any, Any]:
    """Return the inputs of all ranks together."""
    return np.random.default_rng(step).normal(size=(BATCH, 5))


def in_torch(strategy: str, loads: str, saves: str, first: int, steps: int) -> list[float]:
    """Train in PyTorch; without a strategy in this process alone, on all data. Return the losses over whole batches."""
    import torch

    import unidist.torch as ud

    def train(rank: int, size: int) -> list[float]:
        torch.manual_seed(0 if not loads else 99)  # what is loaded must not have been there before
        model: Any = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
        rate = RATE if not loads else 0.5
        optimizer: Any = torch.optim.AdamW(model.parameters(), rate, BETAS, EPSILON, DECAY)
        if strategy:
            model, optimizer = ud.distribute(model, optimizer)
        if loads:
            ud.load(loads, model, optimizer, mapping=TO_TORCH)
        losses = []
        for step in range(first, first + steps):
            inputs = torch.from_numpy(batch(step)[rank::size].copy())
            optimizer.zero_grad()
            loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(ud.allreduce(loss.detach(), name="loss")) if strategy else loss.item())
        if saves:
            ud.save(saves, model, optimizer)
        return losses

    if not strategy:
        return train(0, 1)
    with started(ud, strategy):
        return train(ud.rank(), ud.size())


def in_keras(strategy: str, loads: str, saves: str, first: int, steps: int) -> list[float]:
    """Go on in Keras; return the losses over whole batches."""
    import keras
    import tensorflow as tf

    import unidist.keras as ud

    with started(ud, strategy):
        model: Any = keras.Sequential(
            [
                keras.Input((5,), dtype="float64"),
                keras.layers.Dense(7, activation="tanh", dtype="float64"),
                keras.layers.Dense(1, dtype="float64"),
            ]
        )
        optimizer: Any = keras.optimizers.AdamW(0.5, DECAY, *BETAS, EPSILON)
        model, optimizer = ud.distribute(model, optimizer)
        ud.load(loads, model, optimizer, mapping=TO_KERAS)
        losses = []
        for step in range(first, first + steps):
            inputs = tf.constant(batch(step)[ud.rank() :: ud.size()])
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.squeeze(model(inputs), 1) - tf.reduce_sum(inputs, 1)) ** 2)
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            losses.append(float(ud.allreduce(loss, name="loss")))
        ud.save(saves, model, optimizer)
        return losses


@pytest.mark.parametrize(
    ("begins", "between", "ends"),
    [
        (("zero=3:shared=false", 3), ("zero=1", 2), ("zero=2", 4)),
        (("zero=1", 2), ("zero=3", 3), ("zero=3", 1)),
    ],
)
def test_losses_are_those_of_training_that_was_never_interrupted(
    rank_pool: RankPoolFactory,
    tmp_path: Path,
    begins: tuple[str, int],
    between: tuple[str, int],
    ends: tuple[str, int],
) -> None:
    paths = ["", str(tmp_path / "torch"), str(tmp_path / "keras"), ""]
    [expected] = rank_pool(1).run(in_torch, ("", "", "", 0, 3 * STEPS))
    for number, (train, (strategy, size)) in enumerate(
        zip((in_torch, in_keras, in_torch), (begins, between, ends), strict=True)
    ):
        arguments = (strategy, paths[number], paths[number + 1], number * STEPS, STEPS)
        for losses in rank_pool(size).run(train, arguments, timeout=LONG):
            np.testing.assert_allclose(losses, expected[number * STEPS : (number + 1) * STEPS], rtol=1e-6)
    assert expected[-1] < 0.95 * expected[0], "it does train"
