"""A training of Keras that is resumed, for `test_exact_resume_keras`, on either backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np

import unidist.keras as ud
from unidist.settings import set_variables

SAVED, STEPS = 3, 6


def _step(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dropout(0.3)]
    model: Any = keras.Sequential([*layers, keras.layers.Dense(4)])
    optimizer = keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5))
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return ud.TrainStep(model, optimizer, loss_fn)


def resumed(strategy: str, folder: Path, asynchronous: bool = False) -> list[list[float]]:
    """Return the losses of the steps after the checkpoint: undisturbed, undisturbed once more, and resumed."""
    found = []
    for run in range(3):
        with set_variables({"UNIDIST_STRATEGY": strategy}):
            ud.init()
            try:
                step = _step(7 + run // 2)
                first, losses = 0, []
                if run == 2:
                    ud.load(folder, step.model, step.optimizer, rng=True)
                    first = SAVED
                for number in range(first, STEPS):
                    generator = np.random.default_rng(10 * number + ud.data_rank())
                    x, y = generator.normal(size=(4, 8)).astype("float32"), generator.integers(4, size=4)
                    losses.append(float(step(x, y)))
                    if number + 1 == SAVED and run == 0:
                        ud.save(folder, step.model, step.optimizer, rng=True, asynchronous=asynchronous)
                found.append(losses[-(STEPS - SAVED) :])
            finally:
                ud.shutdown()
                keras.backend.clear_session()
    return found
