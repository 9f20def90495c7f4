"""Distributed tapes: their gradients against those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _keras_training import OPTIMIZERS, alone, data, difference, loss_of, network, runtime, share, values

import unidist.tensorflow as ud
from unidist.errors import UsageError
from unidist.jobs.pool.pool import RankPool
from unidist.runtime import context
from unidist_tensorflow.memory import address_of
from unidist_tensorflow.optimizer import tape as tapes
from unidist_tensorflow.optimizer.tape import DistributedGradientTape, PartialDistributedGradientTape

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


def each_loop(function: Callable[[str], None]) -> None:
    """Run a test's work in both kinds of loop, each with a fresh runtime."""
    for mode in ("eager", "function"):
        with runtime():
            function(mode)


def called(mode: str, function: Callable[[], Any]) -> Any:
    return (tf.function(function) if mode == "function" else function)()


def test_a_loop_with_a_tape_trains_as_one_process(pool: Pool) -> None:
    def on_rank() -> None:
        def check(mode: str) -> None:
            wanted = alone(mode, OPTIMIZERS["adam"])
            for distributed in (True, False):
                model, optimizer = network(), OPTIMIZERS["adam"]()

                def step(
                    x: Any, y: Any, model: Any = model, optimizer: Any = optimizer, distributed: bool = distributed
                ) -> None:
                    with tf.GradientTape() as tape:
                        loss = loss_of(y, model(x))
                    if distributed:
                        tape = DistributedGradientTape(tape)
                    gradients = tape.gradient(loss, model.trainable_variables)
                    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

                run = tf.function(step) if mode == "function" else step
                for x, y in zip(*map(share, data()), strict=True):
                    run(tf.constant(x), tf.constant(y))
                assert (difference(values(model), wanted) < 1e-12) == distributed

        each_loop(check)

    pool(3, "shm").run(on_rank)


def test_gradients_stay_as_they_are_after_the_next_step(pool: Pool) -> None:
    def on_rank() -> None:
        def check(mode: str) -> None:
            w = tf.Variable(tf.ones([256], tf.float64))

            def gradient(factor: Any) -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(w) * factor * (1.0 + ud.rank())
                return DistributedGradientTape(tape, op=ud.Sum).gradient(loss, w)

            run = tf.function(gradient) if mode == "function" else gradient
            kept = {factor: run(tf.constant(factor, tf.float64)) for factor in (1.0, 2.0, 3.0, 4.0)}
            for dropped in (1.0, 3.0, 2.0):  # so that either memory becomes free, and then both
                del kept[dropped]
                for factor in (5.0 * dropped, 6.0 * dropped, 7.0 * dropped):
                    kept[factor] = run(tf.constant(factor, tf.float64))
                assert all((value.numpy() == 3.0 * factor).all() for factor, value in kept.items())

        each_loop(check)

    pool(2, "shm").run(on_rank)


def test_gradients_that_stay_in_variables_are_not_changed_by_the_next_step(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            w, taken, total = (tf.Variable(tf.zeros([256], tf.float64)) for _ in range(3))
            first = tf.Variable(tf.zeros([256], tf.float64))

            @tf.function
            def step(factor: Any) -> None:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(w) * factor * (1.0 + ud.rank())
                gradient = DistributedGradientTape(tape, op=ud.Sum).gradient(loss, w)
                tf.cond(factor == 1.0, lambda: first.assign(gradient), lambda: first)
                taken.assign(gradient)  # a variable takes a tensor's memory over, where it may
                taken.assign_add(tf.ones_like(taken))
                total.assign_add(gradient)

            for number in range(1, 5):
                step(tf.constant(float(number), tf.float64))
                assert (taken.numpy() == 3.0 * number + 1.0).all()
                assert (first.numpy() == 3.0).all()
            assert (total.numpy() == 30.0).all()

    pool(2, "shm").run(on_rank)


def test_gradients_that_nobody_keeps_are_where_the_exchange_left_them(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            w = tf.Variable(tf.ones([256], tf.float64))
            addresses: list[int] = []

            def note(gradient: Any) -> Any:
                addresses.append(address_of(gradient))
                return gradient[0]

            @tf.function
            def step() -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(w * w)
                gradient = DistributedGradientTape(tape).gradient(loss, w)
                return tf.numpy_function(note, [gradient], tf.float64)

            for _ in range(4):
                step()
            [exchange] = tapes._exchanges[context.current()].values()
            assert set(addresses) == {exchange.update.buffer(0).address}

    pool(2, "shm").run(on_rank)


def test_local_sources(pool: Pool) -> None:
    def on_rank() -> None:
        def check(mode: str) -> None:
            layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
            layer.build((1, 1))
            w = tf.Variable(tf.ones([1], tf.float64))
            rank = float(ud.rank())
            for scale, factor in ((True, 0.5), (False, 1.0)):

                def both(scale: bool = scale) -> Any:
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_sum(w) * rank + tf.reduce_sum(layer.kernel) * rank
                    tape = PartialDistributedGradientTape(tape, local_layers=layer, scale_local_gradients=scale)
                    local, shared = tape.get_local_and_global_gradients(loss, [w, layer.kernel])
                    assert local[0][0] is layer.kernel
                    assert shared[0][0] is w
                    return shared[0][1], local[0][1]

                shared, local = called(mode, both)
                np.testing.assert_allclose(shared, [0.5])
                np.testing.assert_allclose(local, [[rank * factor]])

        each_loop(check)

    pool(2, "shm").run(on_rank)


def test_ranks_may_disagree_about_gradients(pool: Pool) -> None:
    def on_rank() -> None:
        def check(mode: str) -> None:
            v, w, unused = tf.Variable(2.0), tf.Variable(3.0), tf.Variable(1.0)

            def gradients() -> Any:
                with tf.GradientTape() as tape:
                    loss = v * 4.0 if ud.rank() == 0 else w * 6.0
                found = DistributedGradientTape(tape).gradient(loss, {"v": v, "w": w, "unused": unused})
                if mode == "eager":
                    assert found.pop("unused") is None
                return found

            found = called(mode, gradients)
            assert (float(found["v"]), float(found["w"]), float(found.get("unused", 0))) == (2.0, 3.0, 0.0)

        each_loop(check)

    pool(2, "shm").run(on_rank)


@pytest.mark.parametrize("as_dense", [False, True])
def test_slices(pool: Pool, as_dense: bool) -> None:
    def on_rank() -> None:
        def check(mode: str) -> None:
            table = tf.Variable(tf.ones([4, 2]))

            def gradient() -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.gather(table, [1, 1 + 2 * ud.rank()]))
                return DistributedGradientTape(tape, sparse_as_dense=as_dense).gradient(loss, table)

            found = called(mode, gradient)
            assert isinstance(found, tf.IndexedSlices)
            np.testing.assert_allclose(tf.convert_to_tensor(found)[:, 0], [0, 1.5, 0, 0.5])
            if not as_dense:
                assert found.indices.numpy().tolist() == [1, 1, 1, 3]

        each_loop(check)

    pool(2, "shm").run(on_rank)


def test_process_set_and_predivide_factor(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            pair = ud.add_process_set([0, 2])
            w = tf.Variable(1.0)
            with tf.GradientTape() as tape:
                loss = w * (1.0 + ud.rank())
            found = DistributedGradientTape(tape, process_set=pair, gradient_predivide_factor=2.0).gradient(loss, w)
            assert float(found) == 2.0
            with pytest.raises(UsageError, match="distributed already"):
                DistributedGradientTape(DistributedGradientTape(tf.GradientTape()))

    pool(3, "shm").run(on_rank)
