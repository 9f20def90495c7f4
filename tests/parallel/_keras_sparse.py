"""Trainings in Keras with embeddings whose rows occur several times in a batch, on ranks and in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import unidist.tensorflow as ud
from unidist.errors import ConfigurationError
from unidist.settings.environment import set_variables
from unidist_tensorflow.training.conformance import computing_in_float64

WORDS, WIDTH, TOKENS, BATCH, STEPS, RANKS = 7, 3, 5, 8, 4, 2

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda **options: keras.optimizers.SGD(0.1, momentum=0.9, **options),
    "adam": lambda **options: keras.optimizers.Adam(0.01, **options),
    "adamax": lambda **options: keras.optimizers.Adamax(0.01, **options),
    "adagrad": lambda **options: keras.optimizers.Adagrad(0.1, **options),
    "rmsprop": lambda **options: keras.optimizers.RMSprop(0.01, **options),
    "adafactor": lambda **options: keras.optimizers.Adafactor(0.01, **options),
    "lamb": lambda **options: keras.optimizers.Lamb(0.01, **options),
    "scaled": lambda **options: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, **options)),
}

Arrays = list[np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Case:
    """A training.

    Args:
        strategy: its line.
        optimizer: a name in the table.
        mode: "eager", "function" or "fit".
        options: of the optimizer.
        built: the optimizer is built, and has made a step, before it is distributed.
        rare: a second embedding has a gradient on rank 0 alone; not in "fit".
        passes: that make an update.
    """

    strategy: str
    optimizer: str
    mode: str = "function"
    options: tuple[tuple[str, Any], ...] = ()
    built: bool = False
    rare: bool = False
    passes: int = 1


class Model(keras.Model):
    """Two embeddings and a layer."""

    def __init__(self, *, rare: bool) -> None:
        super().__init__()
        self.often = keras.layers.Embedding(WORDS, WIDTH, name="often")
        self.rare = keras.layers.Embedding(WORDS, WIDTH, name="rare") if rare else None
        self.last = keras.layers.Dense(2, activation="tanh", name="last")

    def call(self, words_BT: Any, uses_rare: bool = False) -> Any:  # noqa: N803 - dims: batch, tokens
        """Return the outputs, `(batch, 2)`."""
        vectors = self.often(words_BT)
        if uses_rare:
            assert self.rare is not None
            vectors += self.rare(words_BT)
        return self.last(keras.ops.mean(vectors, 1))


def _made(case: Case) -> tuple[Any, Any]:
    keras.utils.set_random_seed(2)
    model = Model(rare=case.rare)
    for uses_rare in {False, case.rare}:
        model(np.zeros((1, TOKENS), "int32"), uses_rare=uses_rare)
    optimizer = OPTIMIZERS[case.optimizer](**dict(case.options))
    if case.built:
        optimizer.build(model.trainable_variables)
        _step(case, model, optimizer, _batches(case, 1, seed=5)[0], range(RANKS))
    return model, optimizer


def _batches(case: Case, steps: int = STEPS, seed: int = 0) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(seed)
    sizes = (steps, case.passes * BATCH)
    words = rng.integers(0, WORDS - 1, (*sizes, TOKENS)).astype("int32")  # one row is never used
    return list(zip(words, rng.standard_normal((*sizes, 2)), strict=True))


def _step(case: Case, model: Any, optimizer: Any, batch: tuple[Any, Any], ranks: Sequence[int]) -> None:
    """Make one step with the samples of some ranks."""
    with tf.GradientTape() as tape:
        losses = []
        for rank in ranks:
            words, targets = (tf.convert_to_tensor(each)[rank::RANKS] for each in batch)
            outputs = model(words, uses_rare=case.rare and rank == 0)
            losses.append(tf.reduce_mean(tf.square(outputs - targets)))
        loss = optimizer.scale_loss(tf.add_n(losses) / len(losses))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


def _train(case: Case, model: Any, optimizer: Any, ranks: Sequence[int], passes: int) -> None:
    if case.mode == "fit":
        model.compile(optimizer, "mse", jit_compile=False)

    def step(words: Any, targets: Any) -> None:
        _step(case, model, optimizer, (words, targets), ranks)

    run = tf.function(step) if case.mode == "function" else step
    for words, targets in _batches(case):
        for turn in range(passes):
            part = slice(turn * BATCH, (turn + 1) * BATCH) if passes > 1 else slice(None)
            if case.mode == "fit":
                mine = np.sort(np.concatenate([np.arange(rank, len(words[part]), RANKS) for rank in ranks]))
                model.train_on_batch(words[part][mine], targets[part][mine])
            else:
                run(tf.constant(words[part]), tf.constant(targets[part]))


def alone(cases: Sequence[Case]) -> list[Arrays]:
    """Train in plain Keras, on the samples of all ranks and passes at once."""
    found = []
    with computing_in_float64():
        for case in cases:
            model, optimizer = _made(case)
            _train(case, model, optimizer, range(RANKS), 1)
            found.append([each.numpy() for each in model.weights])
    return found


@contextmanager
def _distributed(case: Case) -> Iterator[tuple[Any, Any]]:
    with computing_in_float64(), set_variables({"UNIDIST_STRATEGY": case.strategy}):
        ud.init()
        try:
            yield ud.distribute(*_made(case))
        finally:
            ud.shutdown()


def trained(cases: Sequence[Case]) -> list[Arrays]:
    """Train on this rank's samples."""
    found = []
    for case in cases:
        with _distributed(case) as (model, optimizer):
            _train(case, model, optimizer, [ud.rank()], case.passes)
            found.append([each.numpy() for each in model.weights])
    return found


def refused(cases: Sequence[Case]) -> None:
    """Check that a training is an error that names the option."""
    for case in cases:
        name = case.strategy.partition("=")[0]
        with (
            _distributed(case) as (model, optimizer),
            pytest.raises(
                ConfigurationError, match=rf"often/embeddings' is sparse, and Adam takes .*option {name}:sparse=dense"
            ),
        ):
            _train(case, model, optimizer, [ud.rank()], 1)
