"""SyncBatchNormalization against a plain layer in one process on all samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _keras_training import runtime

import unidist.tensorflow as ud
from unidist.jobs.pool.pool import RankPool
from unidist_tensorflow.keras.sync_batch_norm import SyncBatchNormalization
from unidist_tensorflow.training.distributed_optimizer import DistributedOptimizer

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("mode", ["eager", "function", "fit"])
@pytest.mark.parametrize("shape", [(5,), (3, 4, 5)])
def test_trains_as_one_process_on_all_samples(pool: Pool, mode: str, shape: tuple[int, ...]) -> None:
    def on_rank() -> None:
        with runtime():
            x = np.random.default_rng(0).normal(size=(4, 6, *shape)) * 3 + 1

            def train(normal: type[Any], optimizer: Any, batches: Any) -> list[Any]:
                for _ in range(ud.rank()):  # Keras numbers what it makes; ranks may differ in how much that was
                    keras.Sequential([SyncBatchNormalization()])
                keras.utils.set_random_seed(1)
                model = keras.Sequential(
                    [
                        keras.Input(shape),
                        keras.layers.Dense(5),
                        normal(),
                        keras.layers.Dense(4, activation="tanh"),
                        normal(),
                        keras.layers.Dense(1),
                    ]
                )
                if mode == "fit":
                    model.compile(optimizer, "mse", jit_compile=False)
                    rows = batches.shape[1]
                    flat = batches.reshape(-1, *shape)
                    model.fit(flat, flat[..., :1] ** 2, batch_size=rows, shuffle=False, verbose=0)
                    return [variable.numpy() for variable in model.weights]

                def step(batch: Any) -> None:
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_mean((model(batch, training=True) - batch[..., :1] ** 2) ** 2)
                    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

                run = tf.function(step) if mode == "function" else step
                for batch in batches:
                    run(tf.constant(batch))
                return [variable.numpy() for variable in model.weights]

            rows = 6 // ud.size()
            own = x[:, ud.rank() * rows : (ud.rank() + 1) * rows]
            wanted = train(keras.layers.BatchNormalization, keras.optimizers.SGD(0.05), x)
            found = train(SyncBatchNormalization, DistributedOptimizer(keras.optimizers.SGD(0.05)), own)
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)
            local = train(keras.layers.BatchNormalization, DistributedOptimizer(keras.optimizers.SGD(0.05)), own)
            assert max(np.abs(a - b).max() for a, b in zip(local, wanted, strict=True)) > 1e-4

    pool(2, "shm").run(on_rank)


def test_masks_uneven_batches_and_configuration(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            x = np.random.default_rng(0).normal(size=(5, 3, 2))
            mask = np.arange(15).reshape(5, 3) % 4 != 0
            own = slice(0, 2) if ud.rank() == 0 else slice(2, 5)
            layer, plain = SyncBatchNormalization(momentum=0.5), keras.layers.BatchNormalization(momentum=0.5)
            found = layer(tf.constant(x[own]), training=True, mask=tf.constant(mask[own]))
            wanted = plain(tf.constant(x), training=True, mask=tf.constant(mask))
            np.testing.assert_allclose(found, wanted[own], atol=1e-6)  # Keras adds 1e-7 to a mask's sum
            np.testing.assert_allclose(layer.moving_variance.numpy(), plain.moving_variance.numpy(), atol=1e-6)
            again = keras.layers.deserialize(keras.layers.serialize(layer))
            assert type(again) is SyncBatchNormalization
            assert again.momentum == 0.5
            with pytest.raises(ValueError, match="fused"):
                SyncBatchNormalization(fused=True)

    pool(2, "shm").run(on_rank)
