"""Bound Keras optimizers in eager loops and in `tf.function`, against one process on the whole batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _keras_training import (
    OPTIMIZERS,
    alone,
    data,
    difference,
    network,
    runtime,
    share,
    together,
    train,
)

import unidist.tensorflow as ud
from unidist.errors import ConfigurationError, UsageError
from unidist.jobs.pool.pool import RankPool
from unidist_tensorflow.keras.optimizers import PartialDistributedOptimizer
from unidist_tensorflow.training.distributed_optimizer import DistributedOptimizer, distribute

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel

LOOPS = ("eager", "function")


def each_loop(function: Callable[[str], None]) -> None:
    """Run a test's work in both kinds of loop, each with a fresh runtime."""
    for mode in LOOPS:
        with runtime():
            function(mode)


def sizes_and_ways() -> list[object]:
    """Return all combinations of size, mode and optimizer; of every pair of two, one combination is not `soak`."""
    axes = [(1, 2, 3), (*LOOPS, "fit"), tuple(OPTIMIZERS)]
    combinations = itertools.product(*axes)
    return [
        pytest.param(
            *each,
            marks=[pytest.mark.soak] * (sum(axis.index(value) for axis, value in zip(axes, each, strict=True)) % 3 > 0),
        )
        for each in combinations
    ]


@pytest.mark.parametrize(("size", "mode", "optimizer"), sizes_and_ways())
def test_same_weights_as_one_process_on_the_whole_batch(pool: Pool, size: int, mode: str, optimizer: str) -> None:
    def on_rank() -> None:
        with runtime():
            wanted = alone(mode, OPTIMIZERS[optimizer])
            found = together(mode, OPTIMIZERS[optimizer])
            assert difference(found, wanted) < 1e-12
            if ud.size() > 1:  # not so without the exchange: the comparison can fail
                x, y = data()
                without = train(mode, network(), OPTIMIZERS[optimizer](), share(x), share(y))
                assert difference(without, wanted) > 1e-4

    pool(size, "shm" if size > 1 else "single").run(on_rank)


def one_variable(value: Any) -> Any:
    return keras.Variable(np.asarray(value, "float64"), name="w")


def apply(mode: str, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
    """Apply gradients, some of which may be None, in an eager call or in a function."""
    given = [gradient for gradient in gradients if gradient is not None]

    def step(*tensors: Any) -> None:
        rest = iter(tensors)
        optimizer.apply([None if gradient is None else next(rest) for gradient in gradients], variables)

    tensors = [tf.constant(gradient, variables[0].dtype) for gradient in given]
    (tf.function(step) if mode == "function" else step)(*tensors)


def test_clips_the_norm_of_the_reduced_gradients(pool: Pool) -> None:
    def on_rank() -> None:
        def check(mode: str) -> None:
            for clip in ("global_clipnorm", "clipnorm"):
                w = one_variable([0.0])
                optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0, **{clip: 1.0}))
                apply(mode, optimizer, [[10.0] if ud.rank() == 0 else [0.2]], [w])
                # The mean is 5.1, clipped 1.0. Clipped before the exchange it would be (1 + 0.2) / 2.
                np.testing.assert_allclose(w.numpy(), [-1.0])
            w = one_variable([0.0])
            apply(mode, DistributedOptimizer(keras.optimizers.SGD(1.0, clipnorm=1.0), op=ud.Sum), [[0.4]], [w])
            np.testing.assert_allclose(w.numpy(), [-0.8])

        each_loop(check)

    pool(2, "shm").run(on_rank)


def test_an_infinity_on_one_rank_skips_the_step_on_all(pool: Pool) -> None:
    def on_rank() -> None:
        def check(mode: str) -> None:
            w = one_variable([1.0])
            scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0, momentum=0.5), initial_scale=8.0)
            optimizer = DistributedOptimizer(scaled)
            apply(mode, optimizer, [[np.inf] if ud.rank() == 1 else [8.0]], [w])
            assert w.numpy() == [1.0]
            assert float(optimizer.dynamic_scale.numpy()) == 4.0
            assert int(optimizer.iterations.numpy()) == 0
            apply(mode, optimizer, [[4.0]], [w])
            assert w.numpy() == [0.0]

        each_loop(check)

    pool(2, "shm").run(on_rank)


def test_a_loss_scaler_around_a_distributed_optimizer_is_refused(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            inner = DistributedOptimizer(keras.optimizers.SGD())
            with pytest.raises(UsageError, match="Put it inside"):
                keras.optimizers.LossScaleOptimizer(inner)

    pool(2, "shm").run(on_rank)


def test_ranks_may_disagree_about_which_variables_have_gradients(pool: Pool) -> None:
    def on_rank() -> None:
        def check(mode: str) -> None:
            variables = [one_variable([1.0]) for _ in range(4)]
            optimizer = DistributedOptimizer(keras.optimizers.Adam(0.1, weight_decay=0.5))
            reference = keras.optimizers.Adam(0.1, weight_decay=0.5)
            wanted = [one_variable([1.0]) for _ in range(4)]
            here = [[1.0], [3.0] if ud.rank() == 0 else None, [5.0] if ud.rank() == 1 else None, None]
            for _ in range(3):
                apply(mode, optimizer, here, variables)
                reference.apply([tf.constant([g], tf.float64) if g else None for g in (1.0, 1.5, 2.5, 0)], wanted)
            for found, each in zip(variables, wanted, strict=True):
                np.testing.assert_allclose(found.numpy(), each.numpy(), rtol=1e-12)
            assert variables[3].numpy() == [1.0]
            for found, each in zip(optimizer.variables, reference.variables, strict=True):
                np.testing.assert_allclose(found.numpy(), each.numpy(), rtol=1e-6)
            # A rank may leave variables out altogether, or have no gradient at all.
            subset = slice(0, 1) if ud.rank() == 0 else slice(3, 4)
            apply(mode, optimizer, [[1.0]], variables[subset])
            reference.apply([tf.constant([g], tf.float64) if g else None for g in (0.5, 0, 0, 0.5)], wanted)
            for found, each in zip(variables, wanted, strict=True):
                np.testing.assert_allclose(found.numpy(), each.numpy(), rtol=1e-12)

        each_loop(check)

    pool(2, "shm").run(on_rank)


def test_accumulates_passes_and_counts_updates(pool: Pool) -> None:
    def on_rank() -> None:
        def check(mode: str) -> None:
            layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
            model = keras.Sequential([keras.Input((1,)), layer])
            model, optimizer = distribute(model, keras.optimizers.SGD(1.0, momentum=0.5), strategy="accumulate=3")
            seen = []
            for step in range(6):
                apply(mode, optimizer, [[[step + 2.0 * ud.rank()]]], model.trainable_variables)
                seen.append((round(float(layer.kernel.numpy()[0, 0]), 12), int(optimizer.iterations.numpy())))
            # Means over passes and ranks: 2, then 5 with momentum 0.5 * 2.
            assert seen == [(1, 0), (1, 0), (-1, 1), (-1, 1), (-1, 1), (-7, 2)]

        each_loop(check)

    pool(2, "shm").run(on_rank)


def test_backward_passes_per_step_sum_or_average(pool: Pool) -> None:
    def on_rank() -> None:
        def check(mode: str) -> None:
            for average, wanted in ((False, -3.0), (True, -1.5)):
                w = one_variable([0.0])
                optimizer = DistributedOptimizer(
                    keras.optimizers.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=average
                )
                for gradient in ([1.0], [2.0]):
                    assert w.numpy() == [0.0]
                    apply(mode, optimizer, [gradient], [w])
                np.testing.assert_allclose(w.numpy(), [wanted])

        each_loop(check)

    pool(2, "shm").run(on_rank)


def test_flush_applies_a_short_window(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
            model, optimizer = distribute(model, keras.optimizers.SGD(1.0), strategy="accumulate=4")
            [w] = model.trainable_variables
            before = w.numpy().item()
            for gradient in (1.0, 2.0):
                apply("function", optimizer, [[[gradient + ud.rank()]]], [w])
            assert optimizer.flush()
            np.testing.assert_allclose(w.numpy().item(), before - 2.0)
            assert not optimizer.flush()

    pool(2, "shm").run(on_rank)


@pytest.mark.parametrize("as_dense", [False, True])
def test_embeddings(pool: Pool, as_dense: bool) -> None:
    def on_rank() -> None:
        def check(mode: str) -> None:
            def build() -> Any:
                keras.utils.set_random_seed(2)
                return keras.Sequential([keras.Input((4,)), keras.layers.Embedding(10, 3), keras.layers.Flatten()])

            tokens = np.random.default_rng(1).integers(0, 10, size=(5, 6, 4))

            def run(model: Any, optimizer: Any, batches: Any) -> Any:
                def step(batch: Any) -> None:
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_mean(model(batch) ** 2)
                    [gradient] = tape.gradient(loss, model.trainable_variables)
                    assert isinstance(gradient, tf.IndexedSlices)
                    if as_dense:  # Keras itself does not add slices of one row up before it squares them
                        gradient = tf.convert_to_tensor(gradient)
                    optimizer.apply([gradient], model.trainable_variables)

                run_step = tf.function(step) if mode == "function" else step
                for batch in batches:
                    run_step(tf.constant(batch))
                return model.weights[0].numpy()

            rows = 6 // ud.size()
            wanted = run(build(), keras.optimizers.Adam(0.1), tokens)
            own = tokens[:, ud.rank() * rows : (ud.rank() + 1) * rows]
            found = run(build(), DistributedOptimizer(keras.optimizers.Adam(0.1), sparse_as_dense=as_dense), own)
            np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)

        each_loop(check)

    pool(2, "shm").run(on_rank)


def test_ranks_may_disagree_about_sparse_gradients(pool: Pool) -> None:
    def on_rank() -> None:
        def check(mode: str) -> None:
            table, other = one_variable(np.zeros((4, 2))), one_variable([0.0])
            optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)

            def step(kind: str) -> None:
                rows = tf.IndexedSlices(tf.ones([2, 2], tf.float64), tf.constant([1, 1]), tf.constant([4, 2]))
                gradients = {"sparse": rows, "dense": tf.convert_to_tensor(rows), "none": None}
                optimizer.apply([gradients[kind], tf.ones(1, tf.float64)], [table, other])

            run = tf.function(step) if mode == "function" else step
            for first, second in (("sparse", "none"), ("sparse", "dense"), ("none", "sparse"), ("dense", "dense")):
                before = table.numpy()
                for _ in range(2):
                    run(first if ud.rank() == 0 else second)
                factor = 1.0 if "none" in (first, second) else 2.0
                np.testing.assert_allclose(
                    before - table.numpy(), factor * 2 * np.array([[0, 0], [1, 1], [0, 0], [0, 0]])
                )

        each_loop(check)

    pool(2, "shm").run(on_rank)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_variables_of_sixteen_bits(pool: Pool, dtype: str) -> None:
    def on_rank() -> None:
        def check(mode: str) -> None:
            w = keras.Variable(np.zeros((3, 5)), dtype=dtype, name="w")
            scalar = keras.Variable(0.0, dtype=dtype, name="s")
            optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0))
            for _ in range(2):
                apply(mode, optimizer, [np.full((3, 5), ud.rank() * 2.0), 3.0], [w, scalar])
            assert (w.numpy().astype(float) == -2.0).all()
            assert float(scalar.numpy()) == -6.0

        each_loop(check)

    pool(2, "shm").run(on_rank)


def test_several_optimizers_with_local_and_frozen_variables(pool: Pool) -> None:
    def on_rank() -> None:
        def check(mode: str) -> None:
            layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
            layer.build((1, 1))
            first, second, frozen = one_variable([0.0]), one_variable([0.0]), one_variable([7.0])
            partial = PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=layer)
            plain = DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=False)
            plain.register_local_var(second)
            rank = float(ud.rank())
            apply(mode, partial, [[rank], [[2 * rank]], [1.0]], [first, layer.kernel, frozen])
            apply(mode, plain, [[2 * rank]], [second])
            frozen.trainable = False
            apply(mode, partial, [[rank], [[2 * rank]]], [first, layer.kernel])
            assert first.numpy() == [-1.0]
            assert layer.kernel.numpy() == [[-2 * rank]]  # half of the rank's own gradient, twice
            assert second.numpy() == [-2 * rank]
            assert frozen.numpy() == [6.0]

        each_loop(check)

    pool(2, "shm").run(on_rank)


@pytest.mark.parametrize("average", [False, True])
def test_local_variables_get_the_gradients_of_all_passes(pool: Pool, average: bool) -> None:
    """As one process has them that sums up, or averages, the passes of all ranks and divides by their number."""

    def on_rank() -> None:
        def check(mode: str) -> None:
            shared, own, rows = one_variable([1.0, 2.0]), one_variable([1.0, 2.0]), one_variable([[1.0], [2.0]])
            optimizer = DistributedOptimizer(
                keras.optimizers.SGD(0.1, momentum=0.5), backward_passes_per_step=3,
                average_aggregated_gradients=average,
            )  # fmt: skip
            optimizer.register_local_var(own)
            optimizer.register_local_var(rows)
            passes = np.random.default_rng(ud.rank()).normal(size=(7, 2))

            def step(gradient: tf.Tensor, has_rows: bool) -> None:
                slices = tf.IndexedSlices(gradient[:1, None], tf.constant([1]), tf.constant([2, 1]))
                pairs = [(gradient, shared), (gradient, own), *[(slices, rows)] * has_rows]
                optimizer.apply([each for each, _ in pairs], [each for _, each in pairs])

            stepping = tf.function(step, autograph=False) if mode == "function" else step
            optimizer.build([shared, own, rows])
            for i, gradient in enumerate(passes):
                stepping(tf.constant(gradient), i % 3 != 2)
            assert optimizer.flush()

            expected, velocity = np.array([[1.0, 2.0], [1.0, 2.0]]), np.zeros((2, 2))
            for start in (0, 3, 6):
                part = passes[start : start + 3]
                row = part[:2, 0].sum()
                total = np.array([part.sum(axis=0), [0.0, row]]) / ud.size() / (len(part) if average else 1)
                velocity = 0.5 * velocity - 0.1 * total
                expected += velocity
            np.testing.assert_allclose(own.numpy(), expected[0], rtol=0, atol=1e-12)
            np.testing.assert_allclose(rows.numpy()[:, 0], expected[1], rtol=0, atol=1e-12)
            assert np.abs(shared.numpy() - own.numpy()).max() > 1e-3  # which the other rank's gradients are in

        each_loop(check)

    pool(2, "shm").run(on_rank)


def test_gradients_that_an_optimizer_keeps_are_not_overwritten(pool: Pool) -> None:
    def on_rank() -> None:
        class Remembers(keras.optimizers.SGD):
            def build(self, variables: Any) -> None:
                super().build(variables)
                self.last = self.add_optimizer_variables(variables, "last")

            def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
                self.assign(self.last[self._get_variable_index(variable)], gradient)

        def check(mode: str) -> None:
            w = one_variable(np.zeros(64))
            optimizer = DistributedOptimizer(Remembers(1.0))
            history = []
            for value in (1.0, 2.0, 3.0):
                apply(mode, optimizer, [np.full(64, value)], [w])
                history.append(tf.convert_to_tensor(optimizer.last[0]))
            assert [float(each[0]) for each in history] == [1.0, 2.0, 3.0]

        each_loop(check)

    pool(2, "shm").run(on_rank)


def test_variables_are_never_engine_memory(pool: Pool) -> None:
    """TensorFlow reuses memory that nobody waits for; with momentum it could come to lie in a bucket."""

    def on_rank() -> None:
        def check(mode: str) -> None:
            makers: list[Callable[[], Any]] = [
                lambda: keras.optimizers.SGD(1.0, momentum=0.5),
                lambda: keras.optimizers.RMSprop(0.1),
                lambda: keras.optimizers.Adadelta(0.1),
                lambda: keras.optimizers.Lion(0.1),
            ]
            for make in makers:
                found, wanted = one_variable(np.zeros(4096)), one_variable(np.zeros(4096))
                optimizer, reference = DistributedOptimizer(make()), make()
                for step in range(4):
                    gradient = np.linspace(-1, 1, 4096) * (step + 1)
                    apply(mode, optimizer, [gradient * 2 * ud.rank()], [found])
                    reference.apply([tf.constant(gradient)], [wanted])
                np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-12, atol=1e-12)

        each_loop(check)

    pool(2, "shm").run(on_rank)


def test_says_what_does_not_fit(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            optimizer = DistributedOptimizer(keras.optimizers.SGD())
            with pytest.raises(UsageError, match="distributed already"):
                DistributedOptimizer(optimizer)
            with pytest.raises(UsageError, match="no optimizer of Keras 3"):
                DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))
            with pytest.raises(ValueError, match="must be > 0"):
                DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0)
            with pytest.raises(ValueError, match="Average or Sum"):
                DistributedOptimizer(keras.optimizers.SGD(), op=ud.Adasum)
            with pytest.raises(UsageError, match="needs an optimizer"):
                distribute(network())
            with pytest.raises(ConfigurationError, match=r"on rank 1 there is|on rank 0, but"):
                optimizer.apply([tf.zeros(ud.rank() + 1)], [tf.Variable(tf.zeros(ud.rank() + 1))])
            keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
            try:
                with pytest.raises(ConfigurationError, match=r"keras\.distribution is active"):
                    DistributedOptimizer(keras.optimizers.SGD())
            finally:
                keras.distribution.set_distribution(None)

    pool(2, "shm").run(on_rank)


def test_compression_and_groups(pool: Pool) -> None:
    def on_rank() -> None:
        def check(mode: str) -> None:
            v, w = one_variable([0.0, 0.0]), one_variable([0.0])
            inner = keras.optimizers.SGD(1.0)
            inner.build([v, w])
            optimizer = DistributedOptimizer(
                inner, compression=ud.Compression.fp16, groups=[[w, v]], gradient_predivide_factor=2.0
            )
            apply(mode, optimizer, [[1.0, 2.0 * ud.rank()], [0.1]], [v, w])
            np.testing.assert_allclose(v.numpy(), [-1.0, -1.0])
            assert 0 < abs(w.numpy()[0] + 0.1) < 1e-4  # rounded to float16

        each_loop(check)

    pool(2, "shm").run(on_rank)


def test_a_rank_that_has_joined_takes_part(pool: Pool) -> None:
    def on_rank() -> None:
        def check(mode: str) -> None:
            w = one_variable([0.0])
            optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0))
            for _ in range(1 + ud.rank()):
                apply(mode, optimizer, [[2.0]], [w])
            ud.join()
            np.testing.assert_allclose(w.numpy(), [-2.0 - ud.rank()])

        each_loop(check)

    pool(2, "shm").run(on_rank)


def test_a_state_that_rank_0_alone_has_goes_to_all(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            if ud.rank() == 0:
                optimizer.build(model.trainable_variables)
                for each in optimizer.variables[2:]:
                    each.assign(each + 3.0)
            model, optimizer = ud.distribute(model, optimizer, "zero=1")
            held = sum(float(np.sum(each)) for each in optimizer.variables[2:])
            assert float(ud.allreduce(tf.constant(held), op=ud.Sum)) == 3.0 * 8

    pool(2, "shm").run(on_rank)
