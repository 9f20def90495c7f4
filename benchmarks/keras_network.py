"""A dense Keras network of 9 million parameters and its training step, in a loop of one's own and in `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from unidist_bench import BenchmarkRanks, Durations

FEATURES, WIDTH, HIDDEN, CLASSES, BATCH = 512, 1024, 9, 10, 64
STEPS_PER_FIT = 4
"""`fit` itself costs something."""

Wrap = Callable[[Any, Any], tuple[Any, Any]]
WrapTape = Callable[[Any], Any]


def unchanged(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Wrap nothing: training without communication."""
    return model, optimizer


def network() -> Any:
    """Return a network of 9 million parameters."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(HIDDEN)]
    return keras.Sequential([keras.Input((FEATURES,)), *hidden, keras.layers.Dense(CLASSES)])


def batch() -> tuple[Any, Any]:
    """Return samples for a step."""
    generator = np.random.default_rng(0)
    return generator.normal(size=(BATCH, FEATURES)).astype("float32"), generator.integers(CLASSES, size=BATCH)


def make_loop_step(wrap: Wrap, wrap_tape: WrapTape = lambda tape: tape) -> Callable[[], None]:
    """Return a function that does one step in a `tf.function`.

    Args:
        wrap: makes model and optimizer distributed.
        wrap_tape: makes the tape distributed; it is given TensorFlow's variables, not Keras' around them.
    """
    model, optimizer = wrap(network(), keras.optimizers.Adam(1e-4))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = map(tf.constant, batch())
    variables = [variable.value for variable in model.trainable_variables]

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(wrap_tape(tape).gradient(loss, variables), model.trainable_variables)
        return loss

    return lambda: step().numpy()


def make_fit_steps(wrap: Wrap) -> Callable[[], None]:
    """Return a function that does `STEPS_PER_FIT` steps in `fit`."""
    model, optimizer = wrap(network(), keras.optimizers.Adam(1e-4))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    # A dataset that is tuned while it is read is let go only when its tuner has woken up: after 0.3 s, 0.6 s, 1.3 s ...
    options = tf.data.Options()
    options.autotune.enabled = False
    samples = tf.data.Dataset.from_tensors(batch()).repeat(STEPS_PER_FIT).with_options(options)
    return lambda: model.fit(samples, shuffle=False, verbose=0)


def unidist_meeting(ud: Any) -> BenchmarkRanks:
    """Return the meeting of all ranks over unidist, given its facade `unidist.tensorflow`."""

    def all_durations(own: Durations) -> list[Durations]:
        everyone: list[Durations] = ud.allgather_object(own)
        return everyone

    return BenchmarkRanks(lambda: ud.world().barrier().wait(), all_durations)
