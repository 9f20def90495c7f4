"""Trainings in Keras, on TensorFlow or JAX, of a model that reads statistics of its batches; and in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from uneven_keras import COMPILED, computing_in

import unidist.keras as ud
from unidist.training import MeanLoss

FEATURES, ROWS, STEPS = 4, 3, 4


class Centred(keras.layers.Layer):
    """Subtracts a running mean, which each batch moves: linear, so the mean of ranks is that of one process."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)
        self.count = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = inputs - keras.ops.convert_to_tensor(self.mean)
        if training:
            mean = keras.ops.sum(inputs, axis=0) / keras.ops.shape(inputs)[0]  # Keras on JAX rounds its own mean
            self.mean.assign((self.mean + mean) / 2)
            self.count.assign(self.count + 1)
        return outputs


class Shifted(keras.layers.Layer):
    """Adds a weight that nothing changes."""

    def build(self, shape: Any) -> None:
        self.shift = self.add_weight(shape=shape[1:], initializer="ones", trainable=False)

    def call(self, inputs: Any) -> Any:
        return inputs + keras.ops.convert_to_tensor(self.shift)


def network() -> Any:
    """A model with a frozen part, dropout that drops nothing, and statistics in a sub-model."""
    keras.utils.set_random_seed(1)
    frozen = keras.layers.Dense(FEATURES)
    frozen.trainable = False
    inner = keras.Sequential([keras.Input((FEATURES,)), Centred(), keras.layers.Dropout(0.0)])
    return keras.Sequential(
        [keras.Input((FEATURES,)), frozen, Shifted(), inner, keras.layers.Dense(6, "tanh"), Centred()]
    )


def batches(rank: int) -> list[tuple[Any, Any]]:
    """Return features and targets of each step of a rank."""
    rng = np.random.default_rng(rank)
    return [(rng.standard_normal((ROWS, FEATURES)) + rank, rng.standard_normal((ROWS, 6))) for _ in range(STEPS)]


def optimizer(passes: int = 1) -> Any:
    return keras.optimizers.SGD(0.1, gradient_accumulation_steps=passes if passes > 1 else None)


def values(model: Any) -> list[Any]:
    return [np.array(each) for each in model.get_weights()]


def alone(num_ranks: int, passes: int) -> list[Any]:
    """Train on the batches of all ranks together, without unidist; returns the weights."""
    model = network()
    model.compile(optimizer(passes), "mse", jit_compile=COMPILED)
    for parts in zip(*map(batches, range(num_ranks)), strict=True):
        model.train_on_batch(*(np.concatenate(each) for each in zip(*parts, strict=True)))
    return values(model)


def sums_share_statistics() -> None:
    """Check that statistics are means also where gradients are added up."""
    with computing_in("float64"):
        model, bound = ud.distribute(network(), optimizer(), op=ud.Sum)
        model.compile(bound, "mse", jit_compile=COMPILED)
        model.train_on_batch(*batches(ud.rank())[0])
        np.testing.assert_array_equal(*np.split(np.array(ud.allgather(np.array(model.layers[-1].mean))), 2))


def train(way: str, strategy: str) -> Any:
    """Train on this rank's batches; returns the model."""
    model = network()
    if way == "TrainStep":
        step = ud.TrainStep(model, optimizer(), keras.losses.MeanSquaredError(), strategy)
        for x, y in batches(ud.rank()):
            step(x, y)
        return step.model
    model, bound = ud.distribute(model, optimizer(), strategy)
    model.compile(bound, "mse", jit_compile=COMPILED)
    if way == "fit":
        x, y = (np.concatenate(each) for each in zip(*batches(ud.rank()), strict=True))
        model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    else:
        for x, y in batches(ud.rank()):
            model.train_on_batch(x, y)
    return model


@contextmanager
def lengths_exchanged() -> Iterator[list[int]]:
    """Note the lengths of the vectors of statistics that the ranks average."""
    plain, lengths = MeanLoss.average, list[int]()

    def average(self: MeanLoss, values: Any, name: str) -> None:
        lengths.append(len(values))
        plain(self, values, name)

    MeanLoss.average = average  # type: ignore[method-assign]
    try:
        yield lengths
    finally:
        MeanLoss.average = plain  # type: ignore[method-assign]


CASES = [
    ("fit", "data"),
    ("fit", "zero=1"),
    ("batches", "accumulate=2"),
    ("batches", "clip_norm=100"),
    ("TrainStep", "data"),
    ("TrainStep", "accumulate=2"),
]
"""How it is trained, and the strategy."""


def on_rank(cases: list[tuple[str, str]]) -> None:
    """Check that the ranks have the weights and statistics of one process, and exchange no others."""
    with computing_in("float64"), lengths_exchanged() as lengths:
        for way, strategy in cases:
            wanted = alone(ud.size(), 2 if "accumulate" in strategy else 1)
            for one, other in zip(values(train(way, strategy)), wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13, err_msg=f"{way}, {strategy}")
        in_graphs = way != "TrainStep" or COMPILED
        assert set(lengths) == {(FEATURES if not in_graphs else 0) + FEATURES + 6 + 1}


def alone_under_local_sgd() -> None:
    """Check that ranks that step alone exchange nothing in their steps."""
    with computing_in("float64"):
        model = train("fit", "local_sgd=100")
        own = np.array(model.layers[-1].mean)
        assert not np.allclose(*np.split(np.array(ud.allgather(own)), 2))


class LateNorm(keras.Model):
    """Makes its layers when it is first called."""

    def build(self, shape: Any) -> None:
        self.norm = keras.layers.BatchNormalization(momentum=0.5, synchronized=ud.size() > 1)
        self.last = keras.layers.Dense(6)
        self.norm.build(shape)
        self.last.build(shape)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.last(self.norm(inputs, training=training))


def synchronized(way: str, *, late: bool = False) -> None:
    """Check that `BatchNormalization(synchronized=True)` has the statistics of all ranks."""

    def made(*, over_ranks: bool) -> Any:
        keras.utils.set_random_seed(2)
        if late:
            return LateNorm()
        norm = keras.layers.BatchNormalization(momentum=0.5, synchronized=over_ranks)
        return keras.Sequential([keras.Input((FEATURES,)), norm, keras.layers.Dense(6)])

    with computing_in("float64"):
        model = made(over_ranks=True)
        if way == "TrainStep":
            step = ud.TrainStep(model, optimizer(), keras.losses.MeanSquaredError())
            for x, y in batches(ud.rank()):
                step(x, y)
        else:
            model, bound = ud.distribute(model, optimizer())
            model.compile(bound, "mse", jit_compile=COMPILED)
            x, y = (np.concatenate(each) for each in zip(*batches(ud.rank()), strict=True))
            model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
        found = values(model)
        if late:  # the weights of one process are not known: it draws others
            np.testing.assert_array_equal(*np.split(np.array(ud.allgather(found[0][None])), 2))
            x = np.concatenate([each for each, _ in batches(0) + batches(1)])
            means = [np.concatenate([batches(rank)[step][0] for rank in range(2)]).mean(0) for step in range(STEPS)]
            wanted = sum(mean * 0.5 ** (STEPS - step) for step, mean in enumerate(means))
            np.testing.assert_allclose(np.array(model.norm.moving_mean), wanted, rtol=1e-5)
            return
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        whole = made(over_ranks=False)
        whole.compile(optimizer(), "mse", jit_compile=COMPILED)
        for parts in zip(*map(batches, range(2)), strict=True):
            whole.train_on_batch(*(np.concatenate(each) for each in zip(*parts, strict=True)))
        for one, other in zip(found, values(whole), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
