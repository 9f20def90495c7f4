"""Small trainings with Keras that run on the ranks of a pool; imported there too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import unidist.tensorflow as ud
from unidist_tensorflow.training.distributed_optimizer import distribute

STEPS, BATCH, FEATURES, CLASSES = 10, 12, 6, 3
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


@contextmanager
def runtime(floatx: str = "float64") -> Iterator[None]:
    """A fresh runtime around a test's work, with Keras computing in `floatx`."""
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


def data() -> tuple[Any, Any]:
    """The same batches on every rank and in the reference: `(STEPS, BATCH, ...)`."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=(STEPS, BATCH, FEATURES))
    return x, generator.integers(CLASSES, size=(STEPS, BATCH))


def share(batches: Any) -> Any:
    """This rank's rows of each batch."""
    rows = BATCH // ud.size()
    return batches[:, ud.rank() * rows : (ud.rank() + 1) * rows]


def network(seed: int = 5) -> Any:
    """The same weights wherever it is called with the same seed."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(CLASSES)]
    )


def loss_of(y: Any, scores: Any) -> Any:
    """Mean cross-entropy."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, scores)


def train(mode: str, model: Any, optimizer: Any, x: Any, y: Any, **compile_options: Any) -> list[Any]:
    """Train on batches `(STEPS, rows, ...)` and return the weights. `mode` is "eager", "function" or "fit"."""
    if mode == "fit":
        model.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
            **compile_options,
        )
        rows = x.shape[1]
        model.fit(x.reshape(-1, FEATURES), y.reshape(-1), batch_size=rows, shuffle=False, verbose=0)
        return values(model)

    def step(features: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(features, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    run = tf.function(step) if mode == "function" else step
    for features, labels in zip(x, y, strict=True):
        run(tf.constant(features), tf.constant(labels))
    return values(model)


def values(model: Any) -> list[Any]:
    """Every weight's values."""
    return [variable.numpy() for variable in model.weights]


def alone(mode: str, make_optimizer: Callable[[], Any], make_model: Callable[[], Any] = network) -> list[Any]:
    """Train without unidist on the whole batches: what every rank must come to."""
    return train(mode, make_model(), make_optimizer(), *data())


def together(mode: str, make_optimizer: Callable[[], Any], **compile_options: Any) -> list[Any]:
    """Train with unidist, this rank on its share of each batch."""
    model, optimizer = distribute(network(seed=5 + ud.rank()), make_optimizer())
    x, y = data()
    return train(mode, model, optimizer, share(x), share(y), **compile_options)


def difference(found: list[Any], wanted: list[Any]) -> float:
    """Return the largest difference of two lists of weights."""
    assert len(found) == len(wanted)
    return max(float(np.max(np.abs(a - b))) for a, b in zip(found, wanted, strict=True))
