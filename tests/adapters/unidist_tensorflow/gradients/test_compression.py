"""Compressors of a script's own, and gradients in groups, of optimizers and tapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf
from _keras_training import alone, data, difference, network, runtime, share, together, train, values

import unidist.tensorflow as ud
import unidist.tensorflow.keras as hvd
from unidist.jobs.pool.pool import RankPool

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


def each_loop(function: Callable[[str], None]) -> None:
    """Run a test's work in every kind of loop, each with a fresh runtime."""
    for mode in ("eager", "function", "fit"):
        with runtime():
            function(mode)


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def compressor() -> Any:
    """A class as scripts for Horovod have it; keeps what it was called with."""

    class Thousandths:
        calls: ClassVar[list[tuple[tuple[int, ...], str]]] = []

        @classmethod
        def compress(cls, tensor: Any) -> tuple[Any, Any]:
            cls.calls.append((tuple(tensor.shape), tensor.dtype.name))
            return tf.cast(tf.round(tensor * 1000.0), tf.float32), tensor.dtype

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            return tf.cast(tensor, ctx) / 1000.0

    return Thousandths


def test_gradients_travel_as_a_compressor_of_ones_own_has_them(pool: Pool) -> None:
    def on_rank() -> None:
        def check(mode: str) -> None:
            own, model = compressor(), network()
            optimizer = hvd.DistributedOptimizer(sgd(), compression=own)
            x, y = data()
            found = train(mode, model, optimizer, share(x), share(y))
            wanted = alone(mode, sgd)
            assert 1e-5 < difference(found, wanted) < 5e-3  # rounded
            assert set(own.calls) == {(tuple(v.shape), "float64") for v in model.trainable_variables}
            assert len(own.calls) == 10 * len(model.trainable_variables)
            for value in values(model):
                everyone = hvd.allgather(value[None])
                np.testing.assert_array_equal(everyone[0], everyone[1])

        each_loop(check)

    pool(2, "shm").run(on_rank)


def test_a_tape_takes_a_compressor_of_ones_own(pool: Pool) -> None:
    def on_rank() -> None:
        for wrap in (lambda step: step, tf.function):
            with runtime():
                w = tf.Variable([1.0, 2.0], dtype=tf.float64)
                own = compressor()

                @wrap
                def gradient(w: Any = w, own: Any = own) -> Any:
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_sum(w * 0.1234567)
                    return ud.DistributedGradientTape(tape, compression=own(), op=ud.Sum).gradient(loss, w)

                np.testing.assert_allclose(gradient().numpy(), [0.246, 0.246], rtol=1e-6)
                assert own.calls == [((2,), "float64")]
                with pytest.raises(ValueError, match="no compress and decompress"):
                    ud.DistributedGradientTape(tf.GradientTape(), compression=float)

    pool(2, "shm").run(on_rank)


def test_groups_may_be_lists_of_variables_of_an_optimizer_that_is_not_built(pool: Pool) -> None:
    def on_rank() -> None:
        def check(mode: str) -> None:
            model = network()
            first, second, third, fourth = model.trainable_variables
            stranger = tf.Variable(1.0)
            optimizer = hvd.DistributedOptimizer(sgd(), groups=[[third, first], [second, stranger]])
            optimizer.register_local_var(fourth)
            x, y = data()
            train(mode, model, optimizer, share(x), share(y))
            assert optimizer._unidist._update.options.groups == ((2, 0), (1,))
            assert difference(together(mode, sgd), alone(mode, sgd)) < 1e-12  # the runtime is as it was

        each_loop(check)
        with runtime():
            w = tf.Variable(1.0)
            for groups, message in (([["w"]], "variables"), ([[w], [w]], "only appear once"), (0, "positive")):
                with pytest.raises(ValueError, match=message):
                    hvd.DistributedOptimizer(sgd(), groups=groups)
                with pytest.raises(ValueError, match=message):
                    ud.DistributedGradientTape(tf.GradientTape(), groups=groups)

    pool(2, "shm").run(on_rank)


def test_groups_of_a_tape_may_be_lists_of_variables(pool: Pool) -> None:
    def on_rank() -> None:
        for wrap in (lambda step: step, tf.function):
            with runtime():
                v, w, local = (tf.Variable([float(start)] * 3) for start in range(3))

                @wrap
                def gradients(v: Any = v, w: Any = w, local: Any = local) -> Any:
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_sum(v + 2.0 * w + local) * (1.0 + ud.rank())
                    distributed = ud.DistributedGradientTape(tape, groups=[[w, v]])
                    distributed.register_local_source(local)
                    return distributed.gradient(loss, [v, local, w])

                found = [each.numpy()[0] for each in gradients()]
                np.testing.assert_allclose(found, [1.5, (1.0 + ud.rank()) / 2, 3.0])

    pool(2, "shm").run(on_rank)
