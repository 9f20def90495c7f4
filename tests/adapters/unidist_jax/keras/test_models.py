"""Models of many kinds, and several of them, have the numbers of one process with Keras on JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from _keras_training import runtime, values
from keras import layers as L  # noqa: N812 - as Keras' guides have it
from part_pools import PartOfPool

import unidist.keras as ud

pytestmark = pytest.mark.parallel

SAMPLES, BATCH, FEATURES = 16, 8, 6
STRATEGIES = ("data", "zero=1", "zero=2")

Case = tuple[Any, dict[str, Any], Any, Any, dict[str, Any]]
"""A model, options of `compile`, inputs, targets and options of `fit`."""


def _adapted_layers(rng: np.random.Generator) -> Case:
    inputs = keras.Input((FEATURES,))
    first, second = L.Dense(5, "tanh"), L.EinsumDense("ab,bc->ac", output_shape=4)
    model = keras.Model(inputs, L.Dense(1)(second(first(inputs))))
    for layer in (first, second):
        layer.enable_lora(2)
        layer.lora_kernel_b.assign(rng.standard_normal(layer.lora_kernel_b.shape))
    return model, {"loss": "mse"}, rng.standard_normal((SAMPLES, FEATURES)), rng.standard_normal((SAMPLES, 1)), {}


def _masked_words(rng: np.random.Generator) -> Case:
    words = rng.integers(1, 7, (SAMPLES, 5))
    for row in words:
        row[rng.integers(1, 6) :] = 0
    inputs = keras.Input((5,), dtype="int64")
    x = L.GRU(3, return_sequences=True)(L.Embedding(7, 4, mask_zero=True)(inputs))
    model = keras.Model(inputs, L.Dense(2)(L.GlobalAveragePooling1D()(x)))
    return model, {"loss": "mse"}, words, rng.standard_normal((SAMPLES, 2)), {}


def _several_outputs(rng: np.random.Generator) -> Case:
    inputs = keras.Input((FEATURES,))
    x = L.Dense(5, "tanh", kernel_regularizer="l2")(inputs)
    model = keras.Model(inputs, {"a": L.Dense(1, name="a")(x), "b": L.Dense(3, name="b")(L.Add()([x, L.Dense(5)(x)]))})
    losses = {"a": "mse", "b": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    options = {"loss": losses, "loss_weights": {"a": 0.3, "b": 2.0}, "weighted_metrics": {"b": "accuracy"}}
    targets = {"a": rng.standard_normal((SAMPLES, 1)), "b": rng.integers(0, 3, SAMPLES)}
    weights = {"a": rng.random(SAMPLES), "b": rng.random(SAMPLES)}
    return model, options, rng.standard_normal((SAMPLES, FEATURES)), targets, {"sample_weight": weights}


def _image_and_attention(rng: np.random.Generator) -> Case:
    inputs = keras.Input((FEATURES,))
    shared = L.Dense(FEATURES, "tanh")
    image = L.Flatten()(L.Conv2D(3, 2, padding="same")(L.Reshape((3, 2, 1))(shared(shared(inputs)))))
    tokens = L.Reshape((3, 2))(inputs)
    x = L.Concatenate()([image, L.Flatten()(L.MultiHeadAttention(2, 2)(tokens, tokens))])
    model = keras.Model(inputs, L.Dense(1, kernel_constraint=keras.constraints.UnitNorm())(x))
    return model, {"loss": "mse"}, rng.standard_normal((SAMPLES, FEATURES)), rng.standard_normal((SAMPLES, 1)), {}


CASES: dict[str, Callable[[np.random.Generator], Case]] = {
    "adapted layers (LoRA)": _adapted_layers,
    "masked words": _masked_words,
    "several outputs with weights of samples": _several_outputs,
    "an image, attention, a shared layer and a constraint": _image_and_attention,
}


def _of(tree: Any, order: Any) -> Any:
    return jax.tree.map(lambda array: array[order], tree)


def _fitted(name: str, strategy: str | None) -> list[Any]:
    keras.utils.set_random_seed(4)
    model, options, inputs, targets, more = CASES[name](np.random.default_rng(3))
    optimizer, order, size = keras.optimizers.Adam(0.01), np.arange(SAMPLES), 1
    if strategy is not None:
        model, optimizer = ud.distribute(model, optimizer, strategy)
        size = ud.size()
        order = order.reshape(-1, size, BATCH // size)[:, ud.rank()].reshape(-1)
    model.compile(optimizer, **options)
    inputs, targets, more = (_of(each, order) for each in (inputs, targets, more))
    model.fit(inputs, targets, batch_size=BATCH // size, epochs=2, shuffle=False, verbose=0, **more)
    return values(model)


def _generator_and_critic(strategy: str | None) -> list[Any]:
    """Train two models with an optimizer each, in a loop without side effects."""
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    makes = keras.Sequential([keras.Input((3,)), L.Dense(5, "tanh"), L.Dense(4)])
    judges = keras.Sequential([keras.Input((4,)), L.Dense(5, "tanh"), L.Dense(1)])
    optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02, global_clipnorm=0.1)]
    mine = slice(None)
    if strategy is not None:
        makes, optimizers[0] = ud.distribute(makes, optimizers[0], strategy)
        judges, optimizers[1] = ud.distribute(judges, optimizers[1], strategy)
        mine = slice(ud.rank() * BATCH // ud.size(), (ud.rank() + 1) * BATCH // ud.size())
    for model, optimizer in zip((makes, judges), optimizers, strict=True):
        optimizer.build(model.trainable_variables)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)

    def verdict(critic: Any, made: Any, wanted: float) -> Any:
        found = judges.stateless_call(critic, [], made)[0]
        return loss(keras.ops.full_like(found, wanted), found)

    def of_critic(critic: Any, weights: Any, noise: Any, real: Any) -> Any:
        return verdict(critic, makes.stateless_call(weights, [], noise)[0], 0.0) + verdict(critic, real, 1.0)

    def of_generator(weights: Any, critic: Any, noise: Any) -> Any:
        return verdict(critic, makes.stateless_call(weights, [], noise)[0], 1.0)

    @jax.jit
    def step(weights: Any, critic: Any, of_weights: Any, state: Any, noise: Any, real: Any) -> Any:
        critic, state = optimizers[1].stateless_apply(state, jax.grad(of_critic)(critic, weights, noise, real), critic)
        weights, of_weights = optimizers[0].stateless_apply(
            of_weights, jax.grad(of_generator)(weights, critic, noise), weights
        )
        return weights, critic, of_weights, state

    groups = (makes.trainable_variables, judges.trainable_variables, *(each.variables for each in optimizers))
    found = [[variable.value for variable in group] for group in groups]
    for _ in range(4):
        noise, real = rng.standard_normal((BATCH, 3)), rng.standard_normal((BATCH, 4))
        found = step(*found, noise[mine], real[mine])
    return [np.array(value) for group in found[:2] for value in group]


def _errors(trained: Callable[[str | None], list[Any]]) -> list[float]:
    with runtime():
        expected = trained(None)
        return [
            max(float(np.abs(one - other).max()) for one, other in zip(trained(strategy), expected, strict=True))
            for strategy in STRATEGIES
        ]


@pytest.mark.parametrize("name", CASES)
def test_a_model_has_the_numbers_of_one_process(two: PartOfPool, name: str) -> None:
    # Keras rounds gradients of LoRA's layers to float32, also in float64.
    limit = 1e-6 if name == "adapted layers (LoRA)" else 1e-12
    for found in two.run(_errors, (lambda strategy: _fitted(name, strategy),)):
        assert max(found) < limit, found


def test_two_models_with_an_optimizer_each_have_the_numbers_of_one_process(two: PartOfPool) -> None:
    for found in two.run(_errors, (_generator_and_critic,)):
        assert max(found) < 1e-12, found
