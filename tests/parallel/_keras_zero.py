"""The trainings of `_zero_cases` in Keras."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from _zero_cases import BATCH, OVERFLOWS, KerasCase, Parameters, Traffic, by_operation, record
from keras import ops

import unidist.tensorflow as ud
import unidist_zero
from unidist.runtime import context
from unidist_keras.checkpoint import stable_paths
from unidist_tensorflow.training.conformance import computing_in_float64

Batches = Sequence[tuple[Any, ...]]

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda **options: keras.optimizers.SGD(_rate(), momentum=0.9, **options),
    "adamw": lambda **options: keras.optimizers.AdamW(0.01, **{"weight_decay": 0.1, **options}),
    "muon": lambda **options: keras.optimizers.Muon(0.01, weight_decay=0.1, **options),
    "lamb": lambda **options: keras.optimizers.Lamb(0.01, **options),
    "adafactor": lambda **options: keras.optimizers.Adafactor(0.01, **options),
    "nadam": lambda **options: keras.optimizers.Nadam(0.01, **options),
    "schedule_free": lambda **options: keras.optimizers.ScheduleFreeAdamW(0.01, **options),
}


def _rate() -> Any:
    return keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=2, decay_rate=0.7)


class Model(keras.Model):
    """Sizes that no number of ranks divides; a variable used twice, one frozen, one without a gradient, a scalar."""

    def __init__(self, *, constrained: bool = False) -> None:
        super().__init__()
        generator = np.random.default_rng(0)

        def weight(name: str, *shape: int, trainable: bool = True, constraint: Any = None) -> Any:
            values = 0.3 * generator.standard_normal(shape)
            return self.add_weight(
                shape,
                initializer=lambda shape, dtype: ops.cast(values, dtype),
                dtype="float64",
                trainable=trainable,
                constraint=constraint,
                name=name,
            )

        self.inner = weight("inner", 11, 7)
        self.frozen = weight("frozen", 11, trainable=False)
        self.unused = weight("unused", 5, 5)
        self.head = weight("head", 3, 7, constraint=keras.constraints.UnitNorm(axis=1) if constrained else None)
        self.bias = weight("bias", 3)
        self.scale = weight("scale")
        self.empty = weight("empty", 0)

    def call(self, features_BF: Any) -> Any:  # noqa: N803 - dims: batch, features
        """Return the logits, `(batch, classes)`."""
        hidden_BH = ops.tanh(features_BF @ ops.transpose(self.inner) + self.frozen)  # noqa: N806
        return self.scale * (ops.tanh(hidden_BH @ self.inner) @ ops.transpose(self.head)) + self.bias


def _loss(labels: Any, logits: Any) -> Any:
    return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


class Block(keras.layers.Layer):
    """A layer of layers, with one that is used twice."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.norm = keras.layers.LayerNormalization(name="norm")
        self.inner = keras.layers.Dense(width, activation="tanh", name="inner")

    def build(self, shape: Any) -> None:
        """Build the layers."""
        self.norm.build(shape)
        self.inner.build(shape)
        super().build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        """Return the same shape."""
        return x + self.inner(self.norm(self.inner(x)))


class Noisy(Block):
    """A block with dropout."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(width, **options)
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, x: Any, training: bool = False) -> Any:
        """Return the same shape."""
        return super().call(self.dropout(x, training=training))


def layered(*, noisy: bool, seed: int = 3) -> Any:
    """Return a model of layers whose sizes no number of ranks divides; three of them lie in a model within it."""
    keras.utils.set_random_seed(seed)
    features = keras.Input((7,))
    x = keras.layers.Dense(11, activation="tanh", name="first")(features)
    x = Block(11, name="block_a")(x)
    inside = keras.Input((11,))
    y = Block(11, name="block_b")(inside)
    if noisy:
        y = keras.layers.BatchNormalization(name="batch_norm")(Noisy(11, name="noisy")(y))
    x = keras.Model(inside, y, name="within")(x)
    return keras.Model(features, keras.layers.Dense(3, name="head")(x))


def surroundings() -> AbstractContextManager[object]:
    """See `Backend.surroundings`."""
    return computing_in_float64()


def train_alone(case: KerasCase, *, rank: int = 0, size: int = 1) -> Parameters:
    """See `Backend.train_alone`. The batches of a window are one batch."""
    whole = data(case)
    windows = [whole[start : start + case.passes] for start in range(0, len(whole), case.passes)]
    batches = [tuple(np.concatenate(parts) for parts in zip(*window, strict=True)) for window in windows]
    model, optimizer = make(case)
    step_through(replace(case, mode="eager"), model, optimizer, share(batches, rank, size))  # the quickest way
    if case.mode == "fit":
        optimizer.finalize_variable_values(model.trainable_variables)
    return values(model)


def train(case: KerasCase) -> Parameters:
    """See `Backend.train`."""
    model, optimizer = ud.distribute(*make(case))
    if case.loads:
        assert ud.load(case.loads, model, optimizer).extra == {"next": case.first}
    if case.saves_early:
        ud.save(case.saves_early, model, optimizer, extra={"next": case.first})
    step_through(case, model, optimizer, share(data(case)[case.first * case.passes :], ud.rank(), ud.size()))
    check_share(case, model, optimizer)
    if case.saves:
        ud.save(case.saves, model, optimizer, extra={"next": case.steps})
    return values(model)


def make(case: KerasCase) -> tuple[Any, Any]:
    """Return model and optimizer, not distributed."""
    model: Any
    if case.deferred:
        with unidist_zero.deferred():
            model = layered(noisy=case.noisy, seed=3 + ud.rank())
    else:
        model = layered(noisy=case.noisy) if case.layered else Model(constrained=case.constrained)
    if not case.layered:
        model.build((None, 7))
    optimizer: Any = OPTIMIZERS[case.optimizer](**dict(case.options))
    if case.excluded:
        optimizer.exclude_from_weight_decay(var_names=list(case.excluded))
    if case.scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0, dynamic_growth_steps=3)
    return model, optimizer


def data(case: KerasCase) -> Batches:
    """Return the batches of all ranks together, one for each pass."""
    generator = np.random.default_rng(7)
    num_batches = case.steps * case.passes
    batches = [(generator.standard_normal((BATCH, 7)), generator.integers(0, 3, BATCH)) for _ in range(num_batches)]
    if case.scaled:
        batches[OVERFLOWS * case.passes][0][0] = math.inf
    return batches


def share(batches: Batches, rank: int, size: int) -> Batches:
    """Return one rank's share of each batch."""
    return [tuple(np.split(part, size)[rank] for part in batch) for batch in batches]


def step_through(case: KerasCase, model: Any, optimizer: Any, batches: Batches) -> None:
    """Train on these batches, in the way of the case. Without a strategy it is this function that clips."""
    if case.mode == "fit":
        model.compile(optimizer, _loss, jit_compile=False)
        features, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        model.fit(features, labels, batch_size=len(batches[0][0]), shuffle=False, verbose=0)
        return
    scale = optimizer.scale_loss if case.scaled else lambda loss: loss
    limit = None if case.strategy else case.max_norm

    def step(features: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = scale(_loss(labels, model(features, training=True)))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        if limit is not None:
            norm = tf.sqrt(sum(tf.reduce_sum(tf.square(each)) for each in gradients if each is not None))
            gradients = [None if each is None else each * tf.minimum(1.0, limit / (norm + 1e-6)) for each in gradients]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    run = tf.function(step) if case.mode == "function" else step
    for features, labels in batches:
        run(tf.constant(features), tf.constant(labels))


def values(model: Any) -> Parameters:
    """Return copies of the variables, by name."""
    with unidist_zero.gathered(model):
        return {path: np.array(variable.numpy()) for path, variable in stable_paths(model.weights).items()}


def check_share(case: KerasCase, model: Any, optimizer: Any) -> None:
    """Raise unless this rank keeps about its share of the optimizer's state, and at stage 3 of the variables."""
    if case.strategy.startswith("zero") and "whole" not in case.strategy and case.optimizer in ("sgd", "adamw"):
        count = sum(int(np.prod(each.shape)) for each in model.trainable_variables)
        kept = sum(int(np.prod(each.shape)) for each in optimizer.variables)
        slots = {"sgd": 1, "adamw": 2}[case.optimizer] + bool(dict(case.options).get("use_ema"))
        assert kept <= slots * (count / ud.size() + 60) + 10, f"{kept} elements of state for {count} elements"
        if "zero=3" in case.strategy and ud.size() > 1:
            held = sum(int(np.prod(each.value.shape)) for each in model.trainable_variables)
            assert held <= count / ud.size() + 60, f"{held} of {count} elements of the variables are here"


def record_step(case: KerasCase) -> Traffic:
    """See `Backend.record_step`."""
    records = record(context.current())
    model, optimizer = make(case)
    nbytes = sum(8 * int(np.prod(each.shape)) for each in model.trainable_variables)
    model, optimizer = ud.distribute(model, optimizer)
    first, second = share(data(case), ud.rank(), ud.size())
    step_through(case, model, optimizer, [first])
    records.clear()
    step_through(case, model, optimizer, [second])
    attached = model.__dict__.get("_unidist")
    partition = (optimizer._unidist._update.exchanges[0] if attached is None else attached).partition
    own = sum(cut.counts[ud.rank()] * cut.dtype.itemsize for cut in partition.buckets)
    whole = sum(cut.count * cut.dtype.itemsize for cut in partition.buckets)
    return Traffic(by_operation(records), own, whole, nbytes)
