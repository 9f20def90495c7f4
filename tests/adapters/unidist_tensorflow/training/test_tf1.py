"""Distributed optimizers of TF1 in sessions, and Horovod's order of arguments for Keras' ones."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from _keras_training import runtime

import unidist.tensorflow as hvd
from unidist.errors import ConfigurationError, UsageError
from unidist.jobs.pool.pool import RankPool
from unidist.settings.environment import set_variables

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("as_dense", [False, True])
def test_trains_in_a_session_as_one_process(pool: Pool, as_dense: bool) -> None:
    def on_rank() -> None:
        with runtime("float32"), tf.Graph().as_default():
            rank = float(hvd.rank())
            w = tf.compat.v1.get_variable("w", initializer=[1.0 + rank, 2.0])
            table = tf.compat.v1.get_variable("table", initializer=tf.ones([3, 1]))
            own = tf.compat.v1.get_variable("own", initializer=1.0)
            optimizer = (
                hvd.DistributedOptimizer(
                    tf.compat.v1.train.MomentumOptimizer(0.5, 0.5),
                    sparse_as_dense=as_dense,
                    gradient_predivide_factor=2.0,
                )
                if as_dense
                else hvd.DistributedOptimizer(tf.compat.v1.train.MomentumOptimizer(0.5, 0.5))
            )
            assert isinstance(optimizer, tf.compat.v1.train.MomentumOptimizer)
            optimizer.register_local_var(own)
            loss = tf.reduce_sum(w) * (rank + 1) + tf.reduce_sum(tf.gather(table, [hvd.rank(), 1])) + own * rank * 2
            train = optimizer.minimize(loss)
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                session.run(hvd.broadcast_global_variables(0))
                for _ in range(2):
                    session.run(train)
                found = session.run([w, table, own])
            # Gradients 1.5; 0.5, 1.5 and 0; rank. Two steps of momentum 0.5 are 2.5 times the rate.
            np.testing.assert_allclose(found[0], [1 - 1.25 * 1.5, 2 - 1.25 * 1.5])
            np.testing.assert_allclose(found[1][:, 0], [1 - 1.25 * 0.5, 1 - 1.25 * 1.5, 1])
            np.testing.assert_allclose(found[2], 1 - 1.25 * rank)

    pool(2, "shm").run(on_rank)


def test_takes_arguments_in_horovods_order(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime("float32"):
            w = keras.Variable([0.0])
            made = hvd.DistributedOptimizer(
                keras.optimizers.SGD(1.0), "mine", False, "", "", hvd.Compression.none, False, 2, hvd.Sum
            )
            assert made.name == "mine"
            for _ in range(2):
                made.apply([tf.constant([1.0])], [w])
            assert w.numpy() == [-4.0]
            with pytest.raises(UsageError, match="distributed already"):
                hvd.DistributedOptimizer(hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0)))
            with pytest.raises(UsageError, match="backward_passes_per_step"):
                hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2)
            with pytest.raises(UsageError, match="single tensors"):
                hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), compression="fp16")

    pool(2, "shm").run(on_rank)


def test_the_keras_facade_is_found_where_horovod_has_it(pool: Pool) -> None:
    def on_rank() -> None:
        import unidist.keras.callbacks
        import unidist.tensorflow.keras as tensorflow_keras
        import unidist.tensorflow.keras.callbacks

        assert tensorflow_keras.load_model is unidist.keras.load_model
        ours, theirs = unidist.keras.callbacks, unidist.tensorflow.keras.callbacks
        assert theirs.MetricAverageCallback is ours.MetricAverageCallback

    pool(2, "shm").run(on_rank)


@pytest.mark.parametrize("strategy", ["clip_norm=1", "zero=1", "local_sgd=2", "data:compression=fp16"])
def test_a_strategy_that_it_would_ignore_is_refused(pool: Pool, strategy: str) -> None:
    def on_rank() -> None:
        refused = pytest.raises(ConfigurationError, match="an optimizer of TF1 exchanges gradients itself")
        with set_variables({"UNIDIST_STRATEGY": strategy}), runtime("float32"), refused:
            hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5))

    pool(2, "shm").run(on_rank)


def test_a_rank_outside_of_the_process_set_applies_its_own_gradients(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime("float32"):
            first = hvd.add_process_set([0, 1])
            with tf.Graph().as_default():
                w = tf.compat.v1.get_variable("w", initializer=[0.0])
                optimizer = hvd.DistributedOptimizer(
                    tf.compat.v1.train.GradientDescentOptimizer(1.0), process_set=first
                )
                assert optimizer._optimizer is optimizer  # scripts reach Horovod's inner optimizer so
                train = optimizer.minimize(tf.reduce_sum(w) * (1.0 + hvd.rank()))
                with tf.compat.v1.Session() as session:
                    session.run(tf.compat.v1.global_variables_initializer())
                    session.run(train)
                    found = session.run(w)
            np.testing.assert_allclose(found, [-1.5 if hvd.rank() < 2 else -3.0])

    pool(3, "shm").run(on_rank)
