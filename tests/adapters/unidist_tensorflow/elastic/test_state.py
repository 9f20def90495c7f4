"""Committed, restored and synchronised variables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from _modes import runtime

import unidist.tensorflow as ud
from unidist.elastic.peer.memory import PeerMemory
from unidist.errors import PeerLostError
from unidist.jobs.pool.pool import RankPool

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


def test_keras_state(pool: Pool) -> None:
    def on_rank() -> None:
        import keras

        with runtime():
            keras.utils.set_random_seed(ud.rank())
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(3)])
            optimizer = keras.optimizers.Adam()
            optimizer.build(model.trainable_variables)
            with pytest.raises(ValueError, match="build"):
                ud.elastic.TensorFlowKerasState(keras.Sequential([keras.layers.Dense(1)]))
            state = ud.elastic.TensorFlowKerasState(model, optimizer, epoch=ud.rank())

            @ud.elastic.run
            def train(state: ud.elastic.TensorFlowKerasState) -> None:
                assert state.epoch == 0
                kernel = model.layers[0].kernel.numpy()
                assert all(np.array_equal(kernel, other) for other in ud.allgather_object(kernel))
                state.epoch = 5
                state.commit()
                state.epoch = 9
                model.layers[0].kernel.assign(kernel + 1)
                optimizer.variables[0].assign(77)
                state.restore()
                assert state.epoch == 5
                np.testing.assert_array_equal(model.layers[0].kernel.numpy(), kernel)
                assert optimizer.variables[0].numpy() == 0

            train(state)

    pool(2, "shm").run(on_rank)


def test_state_of_which_each_rank_has_a_share_is_brought_back(pool: Pool) -> None:
    def on_rank() -> None:
        import keras

        with runtime():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(3)])
            model, optimizer = ud.distribute(model, keras.optimizers.Adam(0.1, use_ema=True), "zero=2")
            state = ud.elastic.TensorFlowKerasState(model, optimizer, step=0)

            @tf.function
            def step() -> None:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(model(tf.ones((1, 2))) ** 2) * (1.0 + ud.rank())
                optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

            def steps(count: int) -> list[np.ndarray]:
                for _ in range(count):
                    step()
                    state.step += 1
                return model.get_weights()

            @ud.elastic.run
            def train(state: ud.elastic.TensorFlowKerasState) -> None:
                steps(2)
                state.commit()
                first = steps(3)
                optimizer.learning_rate = 0.5
                state.restore()
                assert state.step == 2 == int(optimizer.iterations)
                assert float(optimizer.learning_rate) == np.float32(0.1)
                for found, expected in zip(steps(3), first, strict=True):
                    np.testing.assert_array_equal(found, expected)

            train(state)

    pool(2, "shm").run(on_rank)


def test_a_commit_that_fails_leaves_the_whole_values_of_the_one_before(pool: Pool) -> None:
    """Weights are whole with `zero`, so they are kept by another handler than the shares, whose commit fails."""

    def on_rank() -> None:
        import keras

        with runtime():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(3)])
            model, optimizer = ud.distribute(model, keras.optimizers.Adam(0.1), "zero=2")
            state = ud.elastic.TensorFlowKerasState(model, optimizer, step=0)

            def lose_a_rank(*_: object, **__: object) -> None:
                raise PeerLostError("rank 1 was lost")

            @ud.elastic.run
            def train(state: ud.elastic.TensorFlowKerasState) -> None:
                kernel = model.layers[0].kernel
                for committed in range(1, 4):
                    kernel.assign(np.full((2, 3), float(committed), np.float32))
                    state.step = committed
                    state.commit()
                    for lost in range(2):
                        kernel.assign(np.full((2, 3), 10.0 + lost, np.float32))
                        state.step = 10 + lost
                        with pytest.MonkeyPatch.context() as patch:
                            patch.setattr(PeerMemory, "commit", lose_a_rank)
                            with pytest.raises(PeerLostError):
                                state.commit()
                        state.restore()
                        assert (kernel.numpy().ravel()[0], state.step) == (committed, committed)

            train(state)

    pool(2, "shm").run(on_rank)


def test_variables_in_eager_mode_and_in_a_session(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            variable = tf.Variable([1.0 + ud.rank()])
            state = ud.elastic.TensorFlowState([variable], step=ud.rank())
            state.sync()
            assert (variable.numpy().item(), state.step) == (1.0, 0)
            variable.assign([4.0])
            state.restore()
            assert variable.numpy() == 1.0

            with tf.Graph().as_default():
                variable = tf.compat.v1.get_variable("v", initializer=1.0 + ud.rank())
                with pytest.raises(ValueError, match="session"):
                    ud.elastic.TensorFlowState()
                with tf.compat.v1.Session() as session:
                    session.run(tf.compat.v1.global_variables_initializer())
                    state = ud.elastic.TensorFlowState(step=3)
                    state.sync()
                    assert session.run(variable) == 1.0
                    variable.load(8.0, session)
                    state.commit()
                    variable.load(9.0, session)
                    state.restore()
                    assert session.run(variable) == 8.0

    pool(2, "shm").run(on_rank)
