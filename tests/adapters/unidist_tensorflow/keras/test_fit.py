"""`distribute` with compile, fit and evaluate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _keras_training import (
    BATCH,
    CLASSES,
    FEATURES,
    OPTIMIZERS,
    STEPS,
    alone,
    data,
    difference,
    network,
    runtime,
    share,
    together,
    train,
    values,
)

import unidist.tensorflow as ud
from unidist.errors import UsageError
from unidist.jobs.pool.pool import RankPool
from unidist_tensorflow.training.distributed_optimizer import DistributedOptimizer, distribute

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


def equal_on_all_ranks(model: Any) -> bool:
    """Compare every weight's bits over the ranks."""
    everyone = ud.allgather_object(values(model))
    return all((a == b).all() for other in everyone for a, b in zip(other, everyone[0], strict=True))


def own_data(rows: int = 48) -> tuple[Any, Any]:
    """Data of this rank alone."""
    generator = np.random.default_rng(100 + ud.rank())
    return generator.normal(size=(rows, FEATURES)), generator.integers(CLASSES, size=rows)


def compiled(model: Any, optimizer: Any, **options: Any) -> Any:
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False, **options)
    return model


def test_equal_weights_after_fit_on_different_data(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime("float32"):
            x, y = own_data()
            model, optimizer = distribute(network(seed=ud.rank()), keras.optimizers.Adam(0.01))
            assert equal_on_all_ranks(model)
            compiled(model, optimizer).fit(x, y, batch_size=8, epochs=2, verbose=0)
            assert equal_on_all_ranks(model)
            without = compiled(network(), keras.optimizers.Adam(0.01))
            without.fit(x, y, batch_size=8, epochs=2, verbose=0)
            assert not equal_on_all_ranks(without)

    pool(2, "shm").run(on_rank)


@pytest.mark.parametrize("options", [{"steps_per_execution": 4}, {"run_eagerly": True}])
def test_ways_to_run_steps(pool: Pool, options: dict[str, Any]) -> None:
    def on_rank() -> None:
        with runtime():
            found = together("fit", OPTIMIZERS["sgd"], **options)
            assert difference(found, alone("function", OPTIMIZERS["sgd"])) < 1e-12

    pool(2, "shm").run(on_rank)


def test_accumulates_with_several_steps_per_execution(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            x, y = data()
            model, optimizer = distribute(network(), OPTIMIZERS["adam"](), strategy="accumulate=2")
            found = train("fit", model, optimizer, share(x), share(y), steps_per_execution=5)
            assert int(optimizer.iterations.numpy()) == STEPS // 2
            merged = (x.reshape(STEPS // 2, 2 * BATCH, FEATURES), y.reshape(STEPS // 2, 2 * BATCH))
            wanted = train("function", network(), OPTIMIZERS["adam"](), *merged)
            assert difference(found, wanted) < 1e-12

    pool(2, "shm").run(on_rank)


@pytest.mark.parametrize(("eagerly", "says_built"), [(False, False), (True, False), (False, True)])
def test_a_model_that_is_built_by_its_first_batch(pool: Pool, eagerly: bool, says_built: bool) -> None:
    def on_rank() -> None:
        with runtime():

            class Lazy(keras.Model):
                def __init__(self) -> None:
                    super().__init__()
                    self.scale = self.add_weight(name="scale", shape=(), initializer="ones")
                    self.hidden, self.scores = keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(CLASSES)

                def call(self, inputs: Any) -> Any:
                    return self.scores(self.hidden(inputs)) * self.scale

            keras.utils.set_random_seed(0)
            x, y = data()
            wanted = train("fit", Lazy(), OPTIMIZERS["sgd"](), x, y)
            keras.utils.set_random_seed(ud.rank())
            lazy = Lazy()
            if says_built:  # which builds none of its layers
                lazy.build((None, x.shape[-1]))
            model, optimizer = distribute(lazy, OPTIMIZERS["sgd"]())
            found = train("fit", model, optimizer, share(x), share(y), run_eagerly=eagerly)
            assert difference(found, wanted) < 1e-12

    pool(2, "shm").run(on_rank)


def test_mixed_precision(pool: Pool) -> None:
    def on_rank() -> None:
        for policy, kind in (("mixed_float16", keras.optimizers.LossScaleOptimizer), ("mixed_bfloat16", object)):
            with runtime("float32"):
                keras.config.set_dtype_policy(policy)
                for make in (
                    lambda model, inner: distribute(model, inner)[1],
                    lambda _, inner: DistributedOptimizer(inner),
                ):
                    model = network(seed=1)
                    optimizer = make(model, keras.optimizers.Adam(0.01))
                    assert isinstance(optimizer, kind)
                    x, y = own_data()
                    compiled(model, optimizer)
                    assert model.optimizer is optimizer
                    before = values(model)
                    model.fit(x, y, batch_size=8, verbose=0)
                    assert equal_on_all_ranks(model)
                    assert difference(before, values(model)) > 0
                    if policy == "mixed_float16" and ud.rank() == 1:
                        x[:8] = np.inf
                    if policy == "mixed_float16":
                        scale = float(optimizer.dynamic_scale.numpy())
                        model.fit(x[:8], y[:8], batch_size=8, verbose=0)
                        assert float(optimizer.dynamic_scale.numpy()) == scale / 2
                        assert all(np.isfinite(value).all() for value in values(model))
                        assert equal_on_all_ranks(model)

    pool(2, "shm").run(on_rank)


def test_compiled_before_and_evaluated(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime("float32"):
            model, optimizer = distribute(compiled(network(seed=ud.rank()), "adam", metrics=["accuracy"]))
            assert model.optimizer is optimizer
            x, y = own_data()
            model.fit(x, y, batch_size=16, verbose=0, validation_data=(x, y))
            model.train_on_batch(x[:4], y[:4])
            assert equal_on_all_ranks(model)
            assert 0 <= model.evaluate(x, y, verbose=0, return_dict=True)["accuracy"] <= 1

    pool(2, "shm").run(on_rank)


def test_xla_is_refused(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime("float32"):
            x, y = own_data()
            model, optimizer = distribute(network(), keras.optimizers.SGD())
            model.compile(optimizer, "mse", jit_compile=True)
            with pytest.raises(UsageError, match="jit_compile=False"):
                model.fit(x, y, verbose=0)
            bound = DistributedOptimizer(keras.optimizers.SGD())
            w = keras.Variable([0.0])
            with pytest.raises(UsageError, match="Leave jit_compile out there"):
                tf.function(lambda: bound.apply([tf.ones(1)], [w]), jit_compile=True)()

    pool(2, "shm").run(on_rank)


def test_what_is_saved_is_a_plain_optimizer(pool: Pool, tmp_path: Path) -> None:
    def on_rank() -> None:
        with runtime("float32"):
            x, y = own_data()
            model, optimizer = distribute(network(), keras.optimizers.Adam(0.01, global_clipnorm=1.0))
            assert isinstance(optimizer, keras.optimizers.Adam)
            compiled(model, optimizer).fit(x, y, batch_size=8, verbose=0)
            path = tmp_path / f"{ud.rank()}.keras"
            model.save(path)
            loaded = keras.models.load_model(path)
            assert type(loaded.optimizer) is keras.optimizers.Adam
            assert loaded.optimizer.get_config() == optimizer.get_config()
            again = type(optimizer).from_config(optimizer.get_config())
            assert again.get_config() == optimizer.get_config()
            for found, wanted in zip(loaded.optimizer.variables, optimizer.variables, strict=True):
                np.testing.assert_array_equal(found.numpy(), wanted.numpy())
            # Rank 0's state goes to all, also where only rank 0 has loaded one.
            model = loaded if ud.rank() == 0 else network(seed=9)
            inner = loaded.optimizer if ud.rank() == 0 else keras.optimizers.Adam(0.01, global_clipnorm=1.0)
            model, resumed = distribute(model, inner)
            assert int(resumed.iterations.numpy()) == 6
            compiled(model, resumed).fit(x, y, batch_size=8, verbose=0)
            assert equal_on_all_ranks(model)

    pool(2, "shm").run(on_rank)


@pytest.mark.parametrize("mode", ["eager", "fit"])
def test_a_layer_that_is_never_called_changes_nothing(pool: Pool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():

            class Partly(keras.Model):
                def __init__(self) -> None:
                    super().__init__()
                    self.scores, self.spare = keras.layers.Dense(CLASSES), keras.layers.Dense(CLASSES)

                def call(self, inputs: Any) -> Any:
                    return self.scores(inputs)

            def make(seed: int) -> Any:
                keras.utils.set_random_seed(seed)
                model = Partly()
                model(data()[0][0])
                return model

            x, y = data()
            wanted = train(mode, make(0), OPTIMIZERS["sgd"](), x, y)
            model, optimizer = distribute(make(ud.rank()), OPTIMIZERS["sgd"]())
            assert difference(train(mode, model, optimizer, share(x), share(y)), wanted) < 1e-12

    pool(2, "shm").run(on_rank)
