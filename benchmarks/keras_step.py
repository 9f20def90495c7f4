"""One training step of a dense Keras network: without communication and with unidist, in `fit` and a loop of one's own.

Run by `unidist launch -np 2 -m benchmarks.keras_step OUTPUT REPETITIONS`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import unidist.keras as ud
from unidist.basics import world

FEATURES, WIDTH, HIDDEN, CLASSES, BATCH = 512, 1024, 9, 10, 64
STEPS_PER_CALL = 4
"""Of `fit`, whose calls cost something themselves."""

Wrap = Callable[[Any, Any], tuple[Any, Any]]


def network() -> Any:
    """Return a network of 9 million parameters."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(HIDDEN)]
    return keras.Sequential([keras.Input((FEATURES,)), *hidden, keras.layers.Dense(CLASSES)])


def batch(steps: int = 1) -> tuple[Any, Any]:
    """Return samples for some steps."""
    generator = np.random.default_rng(0)
    rows = BATCH * steps
    return generator.normal(size=(rows, FEATURES)).astype("float32"), generator.integers(CLASSES, size=rows)


def make_loop_step(wrap: Wrap) -> Callable[[], None]:
    """Return a function that does one step in a `tf.function`."""
    model, optimizer = wrap(network(), keras.optimizers.Adam(1e-4))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = map(tf.constant, batch())

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return lambda: step().numpy()


def make_fit_steps(wrap: Wrap) -> Callable[[], None]:
    """Return a function that does `STEPS_PER_CALL` steps in `fit`."""
    model, optimizer = wrap(network(), keras.optimizers.Adam(1e-4))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    x, y = batch(STEPS_PER_CALL)
    return lambda: model.fit(x, y, batch_size=BATCH, verbose=0)


def side_by_side(
    variants: Mapping[str, Callable[[], object]], *, repetitions: int, warmup: int = 3
) -> dict[str, float]:
    """Return medians in seconds, of the slowest rank in each repetition; `benchmarks.timing` without torch."""
    names = list(variants)
    durations = np.zeros((repetitions, len(names)))
    for repetition in range(-warmup, repetitions):
        for turn in range(len(names)):
            column = (turn + repetition) % len(names)
            world().barrier().wait()
            start = time.perf_counter()
            variants[names[column]]()
            if repetition >= 0:
                durations[repetition, column] = time.perf_counter() - start
    slowest = np.max(ud.allgather(durations[None]), axis=0)
    return {name: statistics.median(slowest[:, i].tolist()) for i, name in enumerate(names)}


def main(output: str, repetitions: int) -> None:
    """Measure, and let rank 0 write the medians (seconds) to `output`."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    ud.init()
    wraps: dict[str, Wrap] = {
        "no communication": lambda model, optimizer: (model, optimizer),
        "unidist": ud.distribute,
    }
    medians = side_by_side(
        {f"loop, {name}": make_loop_step(wrap) for name, wrap in wraps.items()}, repetitions=repetitions
    )
    fits = side_by_side(
        {f"fit, {name}": make_fit_steps(wrap) for name, wrap in wraps.items()}, repetitions=max(1, repetitions // 4)
    )
    medians |= {name: value / STEPS_PER_CALL for name, value in fits.items()}
    if ud.rank() == 0:
        with open(output, "w") as file:
            json.dump(medians, file)
    ud.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
