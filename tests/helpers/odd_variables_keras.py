"""Trainings in Keras with unusual variables and learning rates, beside one process; on whichever backend Keras has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import unidist.keras as ud
import unidist_zero
from unidist.settings import set_variables

STEPS, BATCH, FEATURES, OUTPUTS = 3, 12, 6, 4


def _nothing(step: int, model: Any, optimizer: Any) -> None:
    """Leave everything as it is."""


@dataclass(frozen=True)
class Case:
    """A training.

    Args:
        model: builds the model.
        optimizer: builds the optimizer.
        after: what the script does after a step: takes its number, the model and the optimizer.
    """

    model: Callable[[], Any]
    optimizer: Callable[[], Any]
    after: Callable[[int, Any, Any], None] = _nothing


# Models


def net() -> Any:
    """Return two layers."""
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, activation="tanh"), layers.Dense(OUTPUTS)])


class Odd(layers.Layer):
    """Returns its inputs, and has variables.

    Args:
        use: computes the outputs of the layer and its inputs.
        variables: arguments of `add_weight` for each, by name.
    """

    def __init__(self, use: Callable[[Any, Any], Any], **variables: dict[str, Any]) -> None:
        super().__init__()
        self.use, self.of = use, variables

    def build(self, shape: Any) -> None:
        """Make the variables."""
        for name, arguments in self.of.items():
            setattr(self, name, self.add_weight(name=name, **arguments))

    def call(self, x: Any) -> Any:
        """See the class."""
        return self.use(self, x)


def around(*parts: Any) -> Any:
    """Return layers with others between them."""
    return keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(8, activation="tanh"), *parts, layers.Dense(OUTPUTS)]
    )


def zero_sized() -> Any:
    """Return a model with an adapter of rank 0, and with a variable without elements that nothing uses."""
    shapes: dict[str, tuple[int, ...]] = {"down": (8, 0), "up": (0, 8), "unused": (0, 3)}
    variables = {name: {"shape": shape, "initializer": "zeros"} for name, shape in shapes.items()}
    return around(Odd(lambda layer, x: x + (x @ layer.down) @ layer.up, **variables))


def nothing_first() -> Any:
    """Return a model whose first layer has variables without elements alone."""
    nothing = {"shape": (FEATURES, 0), "initializer": "zeros"}
    first = Odd(lambda layer, x: x + ops.sum(x @ layer.nothing, -1, keepdims=True), nothing=nothing)
    return keras.Sequential([keras.Input((FEATURES,)), first, layers.Dense(OUTPUTS)])


def scalars() -> Any:
    """Return a model with a variable without dims."""
    return around(Odd(lambda layer, x: layer.scale * x, scale={"shape": (), "initializer": "ones"}))


def counting() -> Any:
    """Return a model that counts its calls in an integer, and keeps a mask."""

    def use(layer: Any, x: Any) -> Any:
        layer.calls.assign(ops.cast(layer.calls + 1, "int32"))
        return ops.where(ops.convert_to_tensor(layer.mask), x, 0.5 * x)

    calls = {"shape": (), "initializer": "zeros", "dtype": "int32", "trainable": False}
    mask = {"shape": (8,), "initializer": "ones", "dtype": "bool", "trainable": False}
    return around(Odd(use, calls=calls, mask=mask))


def trained_integer() -> Any:
    """Return a model with integers that claim to be trainable."""
    shifts = {"shape": (8,), "initializer": "ones", "dtype": "int32", "trainable": True}
    return around(Odd(lambda layer, x: x + ops.cast(layer.shifts, x.dtype), shifts=shifts))


def several_types() -> Any:
    """Return a model with parameters of 32 bits between those of 64."""
    scale = {"shape": (8,), "initializer": "ones", "dtype": "float32"}
    return around(Odd(lambda layer, x: x * ops.cast(layer.scale, x.dtype), scale=scale))


def complex_numbers() -> Any:
    """Return a model with a complex parameter."""
    turned = {"shape": (8,), "initializer": "ones", "dtype": "complex128", "autocast": False}

    def use(layer: Any, x: Any) -> Any:
        product = ops.cast(x, "complex128") * layer.turned * ops.convert_to_tensor(1 + 0.5j, "complex128")
        return ops.real(product) * ops.imag(product)

    return around(Odd(use, turned=turned))


def unused() -> Any:
    """Return a model with a parameter that no loss depends on."""
    return around(Odd(lambda layer, x: x, unused={"shape": (5, 5), "initializer": "ones"}))


def nothing_trained() -> Any:
    """Return a model of which only a scalar is trained: fewer elements than ranks."""
    model = scalars()
    model.layers[0].trainable = model.layers[-1].trainable = False
    return model


def frozen() -> Any:
    """Return a model with a layer that is not trained."""
    model = around()
    model.layers[0].trainable = False
    return model


def used_twice() -> Any:
    """Return a model that calls a layer twice."""
    inner = layers.Dense(8, activation="tanh")
    return around(inner, inner)


class Transposed(layers.Layer):
    """Multiplies by the transposed kernel of another layer, and by one scale for both.

    Args:
        other: the layer.
    """

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.other = other
        self.kernel = other.kernel  # tracked by both layers
        self.built = True

    def call(self, x: Any) -> Any:
        """See the class."""
        return x @ ops.transpose(self.kernel)


def tied() -> Any:
    """Return a model in which two layers have one variable."""
    first = layers.Dense(8, activation="tanh")
    first.build((None, FEATURES))
    return keras.Sequential([keras.Input((FEATURES,)), first, Transposed(first), layers.Dense(OUTPUTS)])


def same_names() -> Any:
    """Return a model of which two layers have one name, and so their variables have the same paths."""
    inside = keras.Sequential([layers.Dense(8, name="same")], name="twin")
    outside = keras.Sequential([layers.Dense(8, name="same")], name="twin")
    first = keras.Input((FEATURES,))

    class Both(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.last = inside, outside, layers.Dense(OUTPUTS)

        def call(self, x: Any) -> Any:
            return self.last(ops.tanh(self.other(ops.tanh(self.one(x)))))

    model = Both()
    model(ops.zeros(first.shape[1:])[None])
    return model


def penalized() -> Any:
    """Return a model with penalties on a scalar, and on a variable without elements."""
    each = {"initializer": "ones", "regularizer": keras.regularizers.L2(0.1)}
    both = {"scale": {"shape": (), **each}, "nothing": {"shape": (0,), **each}}
    return around(Odd(lambda layer, x: layer.scale * x, **both))


def unbuilt() -> Any:
    """Return a model that is built by its first batch."""
    return keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dense(OUTPUTS)])


def thaw(step: int, model: Any, optimizer: Any) -> None:
    """Train a frozen layer after two steps, which the optimizer does not know."""
    if step == 1:
        model.layers[0].trainable = True
        model.compile(optimizer, loss="mse", jit_compile=False)


def thaw_anew(step: int, model: Any, optimizer: Any) -> None:
    """Train a frozen layer after two steps, by another optimizer."""
    if step == 1:
        model.layers[0].trainable = True
        fresh = adam()
        model.compile(ud.distribute(model, fresh)[1] if ud.is_initialized() else fresh, loss="mse", jit_compile=False)


def freeze(step: int, model: Any, optimizer: Any) -> None:
    """Train a layer no longer after two steps."""
    if step == 1:
        model.layers[0].trainable = False
        model.compile(optimizer, loss="mse", jit_compile=False)


# Optimizers and learning rates


def sgd() -> Any:
    """Return SGD with momentum."""
    return keras.optimizers.SGD(0.1, momentum=0.9)


def adam() -> Any:
    """Return AdamW."""
    return keras.optimizers.AdamW(0.01, weight_decay=0.1)


def scheduled() -> Any:
    """Return Adam with a schedule."""
    return keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.02, 1, 0.5))


def called() -> Any:
    """Return Adam with a learning rate that a function returns."""
    return keras.optimizers.Adam(lambda: 0.02)


def clipped() -> Any:
    """Return SGD that clips each gradient, those of no elements and no dims among them."""
    return keras.optimizers.SGD(0.1, clipnorm=0.01)


def halve(step: int, model: Any, optimizer: Any) -> None:
    """Halve the learning rate, as callbacks do."""
    optimizer.learning_rate = float(ops.convert_to_numpy(optimizer.learning_rate)) / 2


def assign_half(step: int, model: Any, optimizer: Any) -> None:
    """Halve the learning rate in its variable."""
    optimizer.learning_rate.assign(0.01 * 0.5**step)


def change_mask(step: int, model: Any, optimizer: Any) -> None:
    """Change a variable that is not trained, by the script."""
    model.layers[1].mask.assign(np.arange(8) % (step + 2) == 0)


CASES = {
    "zero-sized": Case(zero_sized, sgd),
    "zero-sized, Adam": Case(zero_sized, adam),
    "a layer without elements": Case(nothing_first, adam),
    "without dims": Case(scalars, adam),
    "without dims, clipped": Case(scalars, clipped),
    "a scalar alone": Case(nothing_trained, sgd),
    "penalized": Case(penalized, adam),
    "integer and bool": Case(counting, adam),
    "bool assigned": Case(counting, adam, change_mask),
    "integer, trained": Case(trained_integer, sgd),
    "32 and 64 bits": Case(several_types, adam),
    "complex": Case(complex_numbers, sgd),
    "unused": Case(unused, adam),
    "frozen": Case(frozen, adam),
    "called twice": Case(used_twice, adam),
    "in two layers": Case(tied, adam),
    "equal paths": Case(same_names, adam),
    "built by a batch": Case(unbuilt, adam),
    "layer thawed": Case(frozen, sgd, thaw),
    "layer thawed, new optimizer": Case(frozen, adam, thaw_anew),
    "layer frozen": Case(around, sgd, freeze),
    "rate assigned": Case(net, adam, assign_half),
    "rate halved": Case(net, adam, halve),
    "rate scheduled": Case(net, scheduled),
    "rate by a function": Case(net, called),
}


OF_32_BITS = ("32 and 64 bits",)
"""Cases in which sums are rounded to 32 bits."""

Outcome = float | str
"""The largest difference from one process, or the error."""


def outcomes(strategy: str) -> dict[str, Outcome]:
    """Train each case by a strategy; without an exchange if it is empty."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        return {name: _outcome(name, strategy) for name in CASES}
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def differing(found: Mapping[str, Outcome], refused: Mapping[str, str]) -> dict[str, Outcome]:
    """Return the outcomes that are neither those of one process nor the refusal that is expected.

    Args:
        found: see `outcomes`.
        refused: text of the error, by case.
    """
    wrong = {}
    for name, outcome in found.items():
        if name in refused:
            is_right = isinstance(outcome, str) and refused[name] in outcome
        else:
            is_right = isinstance(outcome, float) and outcome < (1e-6 if name in OF_32_BITS else 1e-12)
        if not is_right:
            wrong[name] = outcome
    return wrong


def _outcome(name: str, strategy: str) -> Outcome:
    expected = _alone(name)
    with set_variables({"UNIDIST_STRATEGY": strategy or "data", "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            found = _caught(CASES[name], ud.rank(), ud.size(), ud.distribute if strategy else _as_they_are)
        finally:
            ud.shutdown()
    if isinstance(found, str) or isinstance(expected, str):
        return found if isinstance(found, str) else f"works, but not in one process: {expected}"
    return max(float(np.abs(one - other).max(initial=0.0)) for one, other in zip(found, expected, strict=True))


@functools.cache
def _alone(name: str) -> list[Any] | str:
    return _caught(CASES[name], 0, 1, _as_they_are)


def _as_they_are(model: Any, optimizer: Any) -> tuple[Any, Any]:
    return model, optimizer


def _caught(*args: Any) -> list[Any] | str:
    try:
        return _train(*args)
    except Exception as exc:  # what is said to the script
        return f"{type(exc).__name__}: {exc}"


def _train(case: Case, rank: int, size: int, distribute: Callable[..., tuple[Any, Any]]) -> list[Any]:
    keras.utils.set_random_seed(1)
    model, optimizer = distribute(case.model(), case.optimizer())
    model.compile(optimizer, loss="mse", jit_compile=False)
    generator = np.random.default_rng(5)
    for step in range(STEPS):
        x, y = (generator.normal(size=(BATCH, width))[rank::size] for width in (FEATURES, OUTPUTS))
        model.train_on_batch(x, y)
        case.after(step, model, optimizer)
    with unidist_zero.gathered(model) if model.__dict__.get("_unidist") is not None else nullcontext():
        return [np.asarray(each, np.complex128) for each in model.get_weights()]
