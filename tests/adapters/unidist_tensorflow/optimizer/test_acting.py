"""Strategies that act on parameters between two updates, under Keras on TensorFlow."""

from __future__ import annotations

from typing import Any

import acting
import numpy as np
import pytest

pytest.importorskip("tensorflow")

from part_pools import PartPools

pytestmark = pytest.mark.parallel


def train(strategy: str, mode: str) -> tuple[Any, list[float]]:
    import keras
    import tensorflow as tf

    import unidist.keras as ud

    ud.init()
    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        keras.utils.clear_session()
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, use_bias=False)])
        model.set_weights([acting.weights()])
        acting.Halves.seen.clear()
        strategies = [*([strategy] if strategy else []), acting.Halves()]
        model, optimizer = ud.distribute(model, keras.optimizers.SGD(0.1), strategies)
        batches = [acting.batch(number, ud.rank(), ud.size()) for number in range(acting.STEPS)]

        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        if mode == "fit":
            model.compile(optimizer, "mse", steps_per_execution=acting.STEPS)
            x, y = (np.concatenate(each) for each in zip(*batches, strict=True))
            model.fit(x, y, batch_size=len(batches[0][0]), shuffle=False, verbose=0)
        else:
            run = tf.function(step) if mode == "function" else step
            for x, y in batches:
                run(tf.constant(x), tf.constant(y))
        return model.get_weights()[0], acting.Halves.seen
    finally:
        keras.config.set_floatx(floatx)
        ud.shutdown()


@pytest.mark.parametrize("mode", ["eager", "function", "fit"])
@pytest.mark.parametrize("strategy", ["", "zero=1"])
def test_it_acts_after_the_updates_that_it_wants(tensorflow_pools: PartPools, strategy: str, mode: str) -> None:
    for found, seen in tensorflow_pools.get(2).run(train, (strategy, mode)):
        np.testing.assert_allclose(found, acting.expected(), rtol=0, atol=1e-14)
        assert seen == [pytest.approx(acting.weights().sum(), rel=1e-14)]
