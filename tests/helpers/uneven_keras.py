"""Trainings in Keras, on TensorFlow or JAX, whose ranks have batches of different size; and in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

import unidist.keras as ud

FEATURES, CLASSES = 4, 3
ROWS = ((5, 5, 5, 3), (2, 2, 2, 2))
"""Of each rank, the samples of its batches."""

COMPILED = keras.backend.backend() == "jax"  # at once JAX rounds constants of Keras to float32


@contextmanager
def computing_in(floatx: str) -> Iterator[None]:
    """Let Keras compute in this type within the block, with a fresh runtime."""
    before = keras.config.floatx()
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(floatx)
    ud.init()
    try:
        yield
    finally:
        ud.shutdown()
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(before)


class PlainStepMixin:
    """Overrides `train_step` without scaling the loss, unlike Keras."""

    def train_step(self: Any, *given: Any) -> Any:
        if keras.backend.backend() == "jax":
            return self._on_jax(*given)
        return self._on_tensorflow(*given)

    def _on_tensorflow(self: Any, data: Any) -> Any:
        import tensorflow as tf

        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), sample_weight)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}

    def _on_jax(self: Any, state: Any, data: Any) -> Any:
        import jax

        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        trainable, others, own, metrics = state

        def loss_of(trainable: Any) -> Any:
            outputs, _, losses = self.stateless_call(trainable, others, x, training=True, return_losses=True)
            return self._compile_loss(y, outputs, sample_weight) + sum(losses)

        loss, gradients = jax.value_and_grad(loss_of)(trainable)
        trainable, own = self.optimizer.stateless_apply(own, gradients, trainable)
        return {"loss": loss}, (trainable, others, own, metrics)


class PlainStep(PlainStepMixin, keras.Sequential):
    """A model of that kind."""


def network(kind: Any = keras.Sequential) -> Any:
    """A model whose layers add a loss, with a factor that is the same in float32."""
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    return kind(
        [keras.Input((FEATURES,)), dense(6, "tanh", kernel_regularizer=keras.regularizers.L2(1 / 64)), dense(CLASSES)]
    )


def optimizer(passes: int = 1) -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=passes if passes > 1 else None)


def loss(reduction: str) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


Batch = tuple[Any, Any, Any]


def batches(rows: tuple[int, ...]) -> list[Batch]:
    """Return features, labels and weights of the samples of each batch."""
    generator = np.random.default_rng(rows[0])
    return [
        (
            generator.standard_normal((count, FEATURES)),
            generator.integers(CLASSES, size=count),
            generator.uniform(0.1, 3, size=count),
        )
        for count in rows
    ]


def values(model: Any) -> list[Any]:
    return [np.array(each) for each in model.get_weights()]


def alone(way: str, reduction: str, passes: int) -> tuple[list[float], list[Any]]:
    """Train on the batches of all ranks together, without unidist; returns losses and weights."""
    model, losses = network(), []
    model.compile(optimizer(passes), loss(reduction), jit_compile=COMPILED)
    for parts in zip(*map(batches, ROWS), strict=True):
        x, y, weights = (np.concatenate(each) for each in zip(*parts, strict=True))
        losses.append(float(model.train_on_batch(x, y, weights if "weights" in way else None)))
        model.reset_metrics()
    return losses, values(model)


def _by_steps(model: Any, reduction: str, strategy: str) -> list[float]:
    step = ud.TrainStep(model, optimizer(), loss(reduction), strategy)
    x, y, _ = batches(ROWS[ud.rank()])[0]
    whole = [np.concatenate(each) for each in zip(*(batches(rows)[0][:2] for rows in ROWS), strict=True)]
    plain = network()
    plain.compile(None, loss(reduction), jit_compile=COMPILED)
    np.testing.assert_allclose(float(step.evaluate(x, y)), plain.test_on_batch(*whole), rtol=1e-12)
    return [float(step(x, y)) for x, y, _ in batches(ROWS[ud.rank()])]


def _compiled(model: Any, reduction: str, strategy: str) -> Any:
    model, bound = ud.distribute(model, optimizer(), strategy)
    model.compile(bound, loss(reduction), jit_compile=COMPILED)
    return model


def _by_batches(model: Any, reduction: str, strategy: str, *, weighted: bool = False) -> None:
    model = _compiled(model, reduction, strategy)
    for x, y, weights in batches(ROWS[ud.rank()]):
        model.train_on_batch(x, y, weights if weighted else None)


def _by_fit(model: Any, reduction: str, strategy: str) -> None:
    rows = ROWS[ud.rank()]
    x, y, _ = (np.concatenate(each) for each in zip(*batches(rows), strict=True))
    _compiled(model, reduction, strategy).fit(x, y, batch_size=rows[0], shuffle=False, verbose=0)


WAYS: dict[str, Callable[[Any, str, str], list[float] | None]] = {
    "TrainStep": _by_steps,
    "fit": _by_fit,
    "batches": _by_batches,
    "own train_step": _by_batches,
    "weights": lambda *given: _by_batches(*given, weighted=True),
}

CASES = [
    ("TrainStep", "sum_over_batch_size", "data"),
    ("TrainStep", "sum_over_batch_size", "zero=1"),
    ("TrainStep", "sum_over_batch_size", "accumulate=2"),
    ("fit", "sum_over_batch_size", "data"),
    ("batches", "sum_over_batch_size", "zero=1"),
    ("batches", "sum_over_batch_size", "accumulate=2"),
    ("own train_step", "sum_over_batch_size", "data"),
    ("weights", "sum_over_batch_size", "data"),
    ("weights", "mean_with_sample_weight", "data"),
]
"""How it is trained, the reduction of the loss, and the strategy."""


def on_rank(cases: list[tuple[str, str, str]]) -> None:
    """Check that two ranks have the numbers of one process."""
    with computing_in("float64"):
        for way, reduction, strategy in cases:
            wanted, weights = alone(way, reduction, 2 if "accumulate" in strategy else 1)
            model = network(PlainStep if way == "own train_step" else keras.Sequential)
            losses = WAYS[way](model, reduction, strategy)
            if losses is not None:
                np.testing.assert_allclose(losses, wanted, rtol=1e-12)
            exact = 1e-6 if COMPILED and way == "own train_step" else 1e-12  # 2e-8 off there, unless batches are equal
            for one, other in zip(values(model), weights, strict=True):
                given = f"{way}, {reduction}, {strategy}"
                np.testing.assert_allclose(one, other, rtol=exact, atol=exact / 10, err_msg=given)
