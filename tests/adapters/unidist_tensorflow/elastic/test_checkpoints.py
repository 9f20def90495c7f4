"""Checkpoints of elastic Keras states: training from one comes to what it would have come to without a stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from _keras_training import data, loss_of, network, runtime, share

import unidist.tensorflow as ud
from unidist.jobs.pool.pool import RankPool

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel
STEPS = 6


def train(folder: Path | None, strategy: str, *, crash_at: int = -1, seed: int = 5) -> tuple[int, list[np.ndarray]]:
    """Train as a rank; return the step at which it began, and the weights at the end."""
    with runtime():
        model = network(seed)
        model, optimizer = ud.distribute(model, keras.optimizers.Adam(0.01), strategy)
        optimizer.build(model.trainable_variables)
        x, y = (share(batches) for batches in data())
        state = ud.elastic.TensorFlowKerasState(model, optimizer, step=0)
        if folder is not None:
            state.checkpoint_to(folder, interval=1e-6)

        @ud.elastic.run
        def loop(state: ud.elastic.TensorFlowKerasState) -> int:
            began = state.step
            while state.step < STEPS:
                with tf.GradientTape() as tape:
                    loss = loss_of(y[state.step], model(x[state.step]))
                optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
                state.step += 1
                state.commit()
                if state.step == crash_at:
                    raise ZeroDivisionError
            return began

        try:
            began = loop(state)
        except ZeroDivisionError:
            began = -1
        return began, model.get_weights()


@pytest.mark.parametrize(("strategy", "later"), [("data", "data"), ("zero=2", "data")])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_ended(
    pool: Pool, tmp_path: Path, strategy: str, later: str
) -> None:
    def on_rank() -> None:
        folder = tmp_path / strategy
        train(folder, strategy, crash_at=4)
        began, again = train(folder, later, seed=6)
        assert 0 < began <= 4
        _, expected = train(None, "data")
        for one, other in zip(again, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)

    pool(2, "shm").run(on_rank)
