"""`TrainStep` of Keras: the numbers of one process, with every strategy that leaves the model whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _keras_training import OPTIMIZERS, data, network, runtime, share, values

import unidist.tensorflow as ud
from unidist.jobs.pool.pool import RankPool

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


def regularised() -> Any:
    """A model whose layers add losses."""
    keras.utils.set_random_seed(5)
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((6,)), dense(8, "tanh", kernel_regularizer="l2"), dense(3)])


def cross_entropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def alone() -> tuple[list[float], list[Any]]:
    """Train one process on the whole batches; returns losses and weights."""
    model, optimizer, losses = regularised(), OPTIMIZERS["adam"](), []
    for x, y in zip(*data(), strict=True):
        with tf.GradientTape() as tape:
            loss = cross_entropy()(y, model(x, training=True)) + tf.add_n(model.losses)
        losses.append(float(loss))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return losses, values(model)


@pytest.mark.parametrize("strategy", ["data", "zero=1", "accumulate=2"])
def test_losses_and_weights_are_those_of_one_process(pool: Pool, strategy: str) -> None:
    def on_rank() -> None:
        with runtime():
            wanted_losses, wanted = alone()
            model = regularised()
            step = ud.TrainStep(model, OPTIMIZERS["adam"](), cross_entropy(), strategy)
            losses = []
            for x, y in zip(*map(share, data()), strict=True):
                if strategy == "accumulate=2":
                    halves = [float(step(x[part::2], y[part::2])) for part in range(2)]
                    losses.append(sum(halves) / 2)
                else:
                    losses.append(float(step(x, y)))
            np.testing.assert_allclose(losses, wanted_losses, rtol=1e-12)
            for a, b in zip(values(model), wanted, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)

    pool(2, "shm").run(on_rank)


def test_a_model_that_is_not_built_gets_rank_0s_weights_and_evaluation_changes_nothing(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            keras.utils.set_random_seed(ud.rank())
            model = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(3)])
            step = ud.TrainStep(model, OPTIMIZERS["sgd"](), cross_entropy())
            x, y = data()[0][0], data()[1][0]
            first = float(step.evaluate(x, y))
            assert first == float(step.evaluate(x, y))
            everyone = ud.allgather_object(values(model))
            assert all((a == b).all() for a, b in zip(*everyone, strict=True))
            for _ in range(20):
                step(x, y)
            assert float(step.evaluate(x, y)) < first
            np.testing.assert_array_equal(step.predict(x), model(x, training=False))

    pool(2, "shm").run(on_rank)


def test_it_works_in_one_process() -> None:
    with runtime():
        model = network()
        step = ud.TrainStep(model, OPTIMIZERS["adam"](), cross_entropy())
        x, y = data()[0][0], data()[1][0]
        assert float(step(x, y)) > float(step(x, y))
