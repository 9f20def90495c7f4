"""Models and optimizers of tf_keras (TF_USE_LEGACY_KERAS=1), with Horovod's script for tf.keras."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import unidist.tensorflow.keras as hvd
from unidist.errors import UsageError
from unidist.jobs.pool.pool import RankPool
from unidist.settings.environment import set_variables

Pool = Callable[..., RankPool]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed"),
]
ROWS, FEATURES = 8, 5


@contextmanager
def runtime(floatx: str = "float64") -> Iterator[Any]:
    """A fresh runtime around a test's work; gives tf_keras, computing in `floatx`."""
    import tf_keras

    before = tf_keras.backend.floatx()
    tf_keras.backend.set_floatx(floatx)
    tf_keras.mixed_precision.set_global_policy(floatx)
    hvd.init()
    try:
        yield tf_keras
    finally:
        hvd.shutdown()
        tf_keras.backend.set_floatx(before)
        tf_keras.mixed_precision.set_global_policy(before)


def legacy(pool: Pool) -> RankPool:
    return pool(2, "shm", TF_USE_LEGACY_KERAS="1")


def network(tf_keras: Any, seed: int) -> Any:
    tf_keras.utils.set_random_seed(seed)
    return tf_keras.Sequential(
        [
            tf_keras.layers.Dense(4, activation="tanh", input_shape=(FEATURES,)),
            tf_keras.layers.Dense(1),
        ]
    )


def data() -> tuple[Any, Any]:
    generator = np.random.default_rng(1)
    return generator.normal(size=(3 * ROWS, FEATURES)), generator.normal(size=(3 * ROWS, 1))


def share(values: Any) -> Any:
    """This rank's rows of each batch."""
    rows = ROWS // hvd.size()
    return np.concatenate([values[at + hvd.rank() * rows :][:rows] for at in range(0, len(values), ROWS)])


@pytest.mark.parametrize("eagerly", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_fit_on_shares_gives_the_weights_of_one_process_on_all_samples(pool: Pool, eagerly: bool) -> None:
    def on_rank() -> None:
        with runtime() as tf_keras:
            x, y = data()
            optimizers: list[Callable[[], Any]] = [
                lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
                lambda: tf_keras.optimizers.Adam(0.01),
                lambda: tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
                lambda: tf_keras.optimizers.legacy.Adam(0.01),
            ]
            for make in optimizers:
                alone = network(tf_keras, seed=0)
                alone.compile(make(), "mse", run_eagerly=eagerly)
                alone.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, epochs=2)

                def train(
                    optimizer: Any, *callbacks: Any, make: Callable[[], Any] = make, alone: Any = alone
                ) -> tuple[float, Any]:
                    model = network(tf_keras, seed=hvd.rank())
                    model.compile(optimizer, "mse", run_eagerly=eagerly)
                    history = model.fit(
                        share(x), share(y), batch_size=ROWS // hvd.size(), shuffle=False, verbose=0, epochs=2,
                        callbacks=list(callbacks),
                    )  # fmt: skip
                    wanted = zip(model.get_weights(), alone.get_weights(), strict=True)
                    return max(float(np.abs(a - b).max()) for a, b in wanted), history.history["loss"]

                broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
                bound = hvd.DistributedOptimizer(make())
                difference, losses = train(bound, broadcast, hvd.callbacks.MetricAverageCallback())
                assert difference < 1e-12
                np.testing.assert_allclose(losses, alone.history.history["loss"], rtol=1e-12)
                assert int(bound.iterations) == 6
                assert train(make(), hvd.callbacks.BroadcastGlobalVariablesCallback(0))[0] > 1e-3

    legacy(pool).run(on_rank)


def each_loop(function: Callable[[Any, Any, Callable[..., Any]], None]) -> None:
    """Run a test's work eagerly and in a tf.function, with present and old optimizers, each with a fresh runtime."""
    for wrap in (lambda step: step, tf.function):
        for old in (False, True):
            with runtime() as tf_keras:
                function(tf_keras, tf_keras.optimizers.legacy if old else tf_keras.optimizers, wrap)


def test_ranks_may_disagree_about_which_variables_have_gradients(pool: Pool) -> None:
    def on_rank() -> None:
        def work(tf_keras: Any, kinds: Any, wrap: Callable[..., Any]) -> None:
            a, b, c = (tf.Variable([1.0, 1.0], dtype=tf.float64) for _ in range(3))
            optimizer = hvd.DistributedOptimizer(kinds.SGD(1.0, momentum=0.5))
            own = [tf.constant([4.0, 2.0], tf.float64) if hvd.rank() == 0 else None, None, None]
            own[1] = tf.IndexedSlices(tf.constant([2.0], tf.float64), tf.constant([hvd.rank()]), tf.constant([2]))

            @wrap
            def step() -> None:
                optimizer.apply_gradients(zip(own, (a, b, c), strict=True))

            step()
            step()
            np.testing.assert_allclose(a.numpy(), [1.0 - 2.0 - 3.0, 1.0 - 1.0 - 1.5])
            np.testing.assert_allclose(b.numpy(), [1.0 - 1.0 - 1.5] * 2)
            assert c.numpy().tolist() == [1.0, 1.0]

        each_loop(work)

    legacy(pool).run(on_rank)


def test_passes_make_one_update_and_local_variables_stay_apart(pool: Pool) -> None:
    def on_rank() -> None:
        def work(tf_keras: Any, kinds: Any, wrap: Callable[..., Any]) -> None:
            w, own = tf.Variable(0.0, dtype=tf.float64), tf.Variable(0.0, dtype=tf.float64)
            optimizer = hvd.DistributedOptimizer(kinds.SGD(1.0), backward_passes_per_step=2)
            optimizer.register_local_var(own)

            @wrap
            def step(gradient: Any) -> None:
                optimizer.apply_gradients([(gradient, w), (gradient, own)])

            gradient = tf.constant(1.0 + hvd.rank(), tf.float64)
            step(gradient)
            assert (float(w), int(optimizer.iterations), int(optimizer._agg_helper.counter)) == (0.0, 1, 1)
            step(gradient)
            assert (float(w), int(optimizer.iterations), int(optimizer._agg_helper.counter)) == (-3.0, 2, 0)
            assert float(own) == -(1.0 + hvd.rank())
            step(gradient)
            assert optimizer.flush()
            assert (float(w), int(optimizer.iterations), int(optimizer._agg_helper.counter)) == (-4.5, 4, 0)
            assert float(own) == -1.5 * (1.0 + hvd.rank())
            assert optimizer.backward_passes_per_step == 2

        each_loop(work)

    legacy(pool).run(on_rank)


def test_an_infinity_on_one_rank_makes_every_rank_skip(pool: Pool) -> None:
    def on_rank() -> None:
        def work(tf_keras: Any, kinds: Any, wrap: Callable[..., Any]) -> None:
            w = tf.Variable(1.0, dtype=tf.float64)
            scaling = tf_keras.mixed_precision.LossScaleOptimizer(kinds.SGD(1.0), initial_scale=8.0)
            optimizer = hvd.DistributedOptimizer(scaling)

            @wrap
            def step(gradient: Any) -> None:
                optimizer.get_scaled_loss(gradient)
                [unscaled] = optimizer.get_unscaled_gradients([gradient])
                optimizer.apply_gradients([(unscaled, w)])

            step(tf.constant(np.inf if hvd.rank() else 8.0, tf.float64))
            assert (float(w), float(optimizer.loss_scale)) == (1.0, 4.0)
            step(tf.constant(4.0 * (1 + hvd.rank()), tf.float64))
            assert float(w) == -0.5

        each_loop(work)
        with runtime("float32") as tf_keras:
            late = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(1.0))
            with pytest.raises(UsageError, match="Put it inside"):
                tf_keras.mixed_precision.LossScaleOptimizer(late)
            tf_keras.mixed_precision.set_global_policy("mixed_float16")
            bound = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.1))
            assert isinstance(bound, tf_keras.mixed_precision.LossScaleOptimizer)
            model = network(tf_keras, seed=hvd.rank())
            model.compile(bound, "mse")
            assert model.optimizer is bound
            x, y = data()
            broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
            model.fit(share(x), share(y), batch_size=ROWS // 2, verbose=0, callbacks=[broadcast])
            for value in model.get_weights():
                gathered = hvd.allgather(value[None])
                np.testing.assert_array_equal(gathered[0], gathered[1])
                assert np.isfinite(gathered).all()

    legacy(pool).run(on_rank)


def test_gradients_of_a_distributed_tape_are_applied_as_they_are(pool: Pool) -> None:
    def on_rank() -> None:
        import unidist.tensorflow as ud

        with runtime() as tf_keras:
            w = tf.Variable(1.0, dtype=tf.float64)
            optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(1.0), op=hvd.Sum)
            with tf.GradientTape() as tape:
                loss = w * (1.0 + ud.rank())
            pairs = [(ud.DistributedGradientTape(tape, op=ud.Sum).gradient(loss, [w])[0], w)]
            optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)
            assert float(w) == -2.0
            optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)
            assert float(w) == -5.0

    legacy(pool).run(on_rank)


@pytest.mark.parametrize("strategy", ["", "accumulate=2", "clip_norm=100"])
def test_gradients_that_were_left_to_be_exchanged_are_not_taken_for_reduced(pool: Pool, strategy: str) -> None:
    def on_rank() -> list[float]:
        with set_variables({"UNIDIST_STRATEGY": strategy} if strategy else {}), runtime() as tf_keras:
            passes = 1 if strategy else 2
            optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.1), backward_passes_per_step=passes)
            weight = tf.Variable([1.0], dtype=tf.float64)
            found = [float(weight[0])]
            for _ in range(4):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(weight) * (hvd.rank() + 1.0)
                pairs = optimizer.compute_gradients(loss, [weight], tape=tape)
                optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)
                found.append(float(weight[0]))
            return found

    expected = {
        "": [1.0, 1.0, 0.7, 0.7, 0.4],  # Horovod's: the sum of two passes
        "accumulate=2": [1.0, 1.0, 0.85, 0.85, 0.7],
        "clip_norm=100": [1.0, 0.85, 0.7, 0.55, 0.4],
    }
    for found in legacy(pool).run(on_rank):
        np.testing.assert_allclose(found, expected[strategy], rtol=0, atol=1e-12)


def test_saves_the_best_model_which_loads_plain_and_distributed(pool: Pool, tmp_path: Path) -> None:
    def on_rank() -> None:
        with runtime() as tf_keras:
            x, y = data()
            model = network(tf_keras, seed=0)
            model.compile(hvd.DistributedOptimizer(tf_keras.optimizers.Adam(0.01)), "mse")
            best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
            best.filepath = str(tmp_path / f"{hvd.rank()}.keras")
            warmup = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1)
            history = model.fit(
                share(x), share(y), batch_size=4, epochs=2, verbose=0,
                callbacks=[hvd.callbacks.MetricAverageCallback(), warmup, best],
            )  # fmt: skip
            np.testing.assert_allclose(history.history["lr"], [0.3, 0.4], rtol=1e-6)
            plain = tf_keras.models.load_model(best.filepath)
            assert not hasattr(plain.optimizer, "flush")
            loaded = hvd.load_model(best.filepath)
            assert loaded.optimizer.flush() is False
            again = [each.fit(share(x), share(y), verbose=0).history["loss"] for each in (plain, loaded)]
            assert np.isfinite(again).all()
            model.compile(hvd.DistributedOptimizer(tf_keras.optimizers.legacy.SGD(0.1, momentum=0.5)), "mse")
            schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)
            history = model.fit(share(x), share(y), batch_size=4, epochs=2, verbose=0, callbacks=[schedule])
            np.testing.assert_allclose(history.history["lr"], [0.1, 0.05], rtol=1e-6)
            model.save(str(tmp_path / f"old{hvd.rank()}.h5"))
            old = hvd.load_model(str(tmp_path / f"old{hvd.rank()}.h5"), legacy_opts=True)
            assert isinstance(old.optimizer, tf_keras.optimizers.legacy.SGD)
            assert old.optimizer.flush() is False
            old.fit(share(x), share(y), verbose=0)

    legacy(pool).run(on_rank)


def test_batches_are_normalised_over_all_ranks(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime() as tf_keras:
            x = np.random.default_rng(2).normal(size=(ROWS, 3, FEATURES))
            for axis in (-1, [1, 2]):
                layers = [
                    tf_keras.layers.BatchNormalization(axis=axis, fused=False),
                    hvd.SyncBatchNormalization(axis=axis),
                ]
                results = []
                for layer, values in zip(layers, (x, share(x)), strict=True):
                    inputs = tf.constant(values)
                    with tf.GradientTape() as tape:
                        tape.watch(inputs)
                        outputs = layer(inputs, training=True)
                        loss = tf.reduce_sum(outputs**3)
                    gradient = tape.gradient(loss, inputs)
                    results.append((outputs.numpy(), gradient.numpy(), layer.moving_variance.numpy()))
                (outputs, gradient, variance), (own_outputs, own_gradient, own_variance) = results
                np.testing.assert_allclose(own_outputs, share(outputs), rtol=1e-10, atol=1e-12)
                np.testing.assert_allclose(own_gradient, share(gradient), rtol=1e-8, atol=1e-10)
                np.testing.assert_allclose(own_variance, variance, rtol=1e-12)

    legacy(pool).run(on_rank)


def test_what_cannot_be_distributed_is_told(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime() as tf_keras:
            bound = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(1.0))
            with pytest.raises(UsageError, match="distributed already"):
                hvd.DistributedOptimizer(bound)
            model = network(tf_keras, seed=0)
            with pytest.raises(UsageError, match="use DistributedOptimizer"):
                hvd.distribute(model, tf_keras.optimizers.SGD(1.0))

    legacy(pool).run(on_rank)
