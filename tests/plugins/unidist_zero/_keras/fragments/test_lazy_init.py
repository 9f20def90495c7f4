"""Keras models that are built without values, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

import unidist.tensorflow as ud  # noqa: E402 - after TensorFlow is known to be there
import unidist_zero  # noqa: E402 - after TensorFlow is known to be there
from unidist.errors import ConfigurationError  # noqa: E402 - after TensorFlow is known to be there
from unidist_tensorflow.training.lazy_init import lacks_value  # noqa: E402 - after TensorFlow is known to be there


@pytest.fixture(autouse=True)
def _runtime() -> Iterator[None]:
    ud.init()
    yield
    ud.shutdown()


def network() -> Any:
    keras.utils.set_random_seed(0)
    features = keras.Input((4,))
    hidden = keras.layers.Dense(3, name="first")(features)
    hidden = keras.layers.BatchNormalization(name="norm")(hidden)
    hidden = keras.layers.Dropout(0.1, seed=1)(hidden)
    return keras.Model(features, keras.layers.Dense(2, name="second")(hidden))


def without_values() -> Any:
    with unidist_zero.deferred():
        return network()


def trained(model: Any, strategy: str) -> list[Any]:
    model, optimizer = ud.distribute(model, keras.optimizers.Adam(0.01), strategy)
    found = values(model)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(model(tf.ones((8, 4)), training=True), tf.float32) - 1.0))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
    return found + values(model)


def values(model: Any) -> list[Any]:
    with unidist_zero.gathered(model):
        return [weight.numpy() for weight in model.weights]


@pytest.mark.parametrize("strategy", ["zero=3", "zero=3,precision=bf16"])
def test_values_and_training_are_those_of_a_model_that_was_built_with_values(strategy: str) -> None:
    expected = trained(network(), strategy)
    model = without_values()
    assert all(lacks_value(variable) for variable in model.variables)
    for found, wanted in zip(trained(model, strategy), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_variables_stay_without_values_when_keras_builds_something_else() -> None:
    before = keras.layers.Dense(2)
    model = without_values()
    with keras.StatelessScope():  # at whose end Keras initialises what was made without values
        made = keras.Variable("zeros", shape=(2,))
    assert not lacks_value(made)
    before.build((None, 3))
    assert not any(map(lacks_value, before.variables))
    assert all(map(lacks_value, model.variables))


@pytest.mark.parametrize("strategy", ["data", "zero=2"])
def test_strategies_that_need_the_values_say_so(strategy: str) -> None:
    with pytest.raises(ConfigurationError, match=r"'first/kernel' has no values.*zero=3.*unidist_zero.deferred"):
        ud.distribute(without_values(), keras.optimizers.Adam(), strategy)
