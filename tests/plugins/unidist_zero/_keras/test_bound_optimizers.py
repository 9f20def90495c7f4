"""ZeRO and Keras optimizers that ranks bring in different states."""

from __future__ import annotations

import numpy as np
import pytest
from part_pools import PartPools

pytest.importorskip("tensorflow", reason="the training is in Keras on TensorFlow")

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return tensorflow_pools


def test_an_optimizer_that_rank_0_alone_has_built_is_built_on_all(tensorflow_pools: PartPools) -> None:
    def on_rank() -> list[list[float]]:
        import keras
        import tensorflow as tf

        import unidist.keras as ud

        ud.init()
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
        optimizer = keras.optimizers.Adam(0.1)
        if ud.rank() == 0:  # as after a load
            optimizer.build(model.trainable_variables)
        model, optimizer = ud.distribute(model, optimizer, "zero=1")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(tf.ones((2, 4)) * (1.0 + ud.rank()))))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        found = [np.asarray(each).reshape(-1).tolist() for each in model.trainable_variables]
        ud.shutdown()
        return found

    first, second = tensorflow_pools.get(2).run(on_rank)
    assert first == second
