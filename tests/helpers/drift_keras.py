"""What ranks share and decide in `fit` and `TrainStep` of Keras, on TensorFlow or JAX: one rank does something else."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from uneven_keras import COMPILED

import unidist.keras as ud
from unidist.errors import MismatchError, UsageError

ROWS, STEPS = 4, 3


def network() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])


def data(rank: int) -> tuple[Any, Any]:
    """Return this rank's samples: targets of rank 1 are further and further from what the model can learn."""
    rng = np.random.default_rng(rank)
    return rng.standard_normal((ROWS * STEPS, 3)), rng.standard_normal((ROWS * STEPS, 1)) * (1 + 9 * rank)


def distributed(strategy: str = "data") -> Any:
    model, optimizer = ud.distribute(network(), keras.optimizers.SGD(0.05), strategy)
    model.compile(optimizer, "mse", jit_compile=COMPILED)
    return model


def fit(model: Any, *callbacks: Any, epochs: int = 4, **options: Any) -> Any:
    x, y = data(ud.rank())
    own = {"callbacks": list(callbacks)} if callbacks else {}
    return model.fit(x, y, batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0, **own, **options)


class _OnRankOne(keras.callbacks.Callback):
    """Calls a function on rank 1 at the end of the first epoch, or after its second batch."""

    def __init__(self, change: Callable[[Any], object], *, at: str = "epoch") -> None:
        super().__init__()
        self._change, self._at = change, at

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if ud.rank() == 1 and self._at == "batch" and batch == 1:
            self._change(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if ud.rank() == 1 and self._at == "epoch" and epoch == 0:
            self._change(self.model)


def _set_rate(model: Any) -> None:
    model.optimizer.learning_rate = 0.01


def _set_weights(model: Any) -> None:
    model.layers[0].set_weights([each * 1.5 for each in model.layers[0].get_weights()])


def _expect(error: type[Exception], text: str, run: Callable[[], object]) -> None:
    with pytest.raises(error, match=re.escape(text)):
        run()


def logs_are_means() -> None:
    history = fit(distributed()).history["loss"]
    plain = network()
    plain.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=COMPILED)
    parts = [data(rank) for rank in range(2)]
    losses = []
    for _ in range(4):
        epoch = []
        for step in range(STEPS):
            rows = slice(step * ROWS, (step + 1) * ROWS)
            x, y = (np.concatenate([part[index][rows] for part in parts]) for index in range(2))
            epoch.append(float(plain.train_on_batch(x, y)))
            plain.reset_metrics()
        losses.append(np.mean(epoch))
    np.testing.assert_allclose(history, losses, rtol=1e-4)


def rates_are_lowered_alike() -> None:
    """Rank 0 learns, so its own loss would never lower its learning rate."""
    model = distributed()
    x, y = data(0) if ud.rank() == 0 else (data(1)[0], data(1)[1] * 100)
    model.fit(
        *(x, y),
        batch_size=ROWS,
        epochs=6,
        verbose=0,
        shuffle=False,
        callbacks=keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9),
    )
    assert float(np.asarray(model.optimizer.learning_rate)) < 0.05


def all_stop_together() -> None:
    def stop(model: Any) -> None:
        model.stop_training = True

    history = fit(distributed(), _OnRankOne(stop))
    assert len(history.epoch) == 1


def early_stopping_restores_the_same_weights() -> None:
    model = distributed()
    stopping = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1e9, restore_best_weights=True)
    history = fit(model, stopping, epochs=8)
    lengths = np.array(ud.allgather(np.array([len(history.epoch)])))
    assert len(set(lengths.tolist())) == 1
    assert lengths[0] < 8
    own = np.concatenate([each.ravel() for each in model.get_weights()])[None]
    both = np.array(ud.allgather(own))
    np.testing.assert_array_equal(both[0], both[1])


def a_rate_of_one_rank() -> None:
    _expect(MismatchError, "the learning rate is not the same", lambda: fit(distributed(), _OnRankOne(_set_rate)))


def weights_of_one_rank() -> None:
    _expect(MismatchError, "'", lambda: fit(distributed(), _OnRankOne(_set_weights)))


def weights_of_one_rank_within_an_epoch() -> None:
    change = _OnRankOne(_set_weights, at="batch")
    _expect(MismatchError, "after step 2 of fit", lambda: fit(distributed(), change))


def weights_of_one_rank_between_steps() -> None:
    step = ud.TrainStep(network(), keras.optimizers.SGD(0.05), keras.losses.MeanSquaredError())
    step(*data(ud.rank()))
    if ud.rank() == 1:
        _set_weights(step.model)
    _expect(MismatchError, "after step 2, parameter ", lambda: step(*data(ud.rank())))


def a_rate_of_one_rank_in_a_step() -> None:
    step = ud.TrainStep(network(), keras.optimizers.SGD(0.05), keras.losses.MeanSquaredError())
    if ud.rank() == 1:
        step.optimizer.learning_rate = 0.01
    x, y = np.zeros((ROWS, 3)), np.zeros((ROWS, 1))  # of which all gradients are 0
    _expect(MismatchError, "after step 1, the learning rate is not the same", lambda: step(x, y))


def another_optimizer() -> None:
    model = distributed()
    model.compile("sgd", "mse", jit_compile=COMPILED)
    _expect(UsageError, "fit trains with a SGD that is not distributed", lambda: fit(model))


def an_optimizer_that_is_not_used() -> None:
    """A model whose `train_step` uses the bound optimizer, and whose `compile` has made another one."""
    model = distributed()
    bound = model.optimizer
    model.compile("sgd", "mse", jit_compile=COMPILED)
    plain = model.train_step

    def train_step(*given: Any) -> Any:
        other, model.optimizer = model.optimizer, bound
        try:
            return plain(*given)
        finally:
            model.optimizer = other

    if COMPILED:
        return  # on JAX the state of `model.optimizer` is that of the step
    model.train_step = train_step
    fit(model)


def files_of_one_name_are_written_once() -> None:
    """Each rank writes what the others do not name; a backup is read on all."""
    folder = ud.broadcast_object(tempfile.mkdtemp() if ud.rank() == 0 else None)
    written: list[str] = []

    class Noted(keras.callbacks.ModelCheckpoint):
        def _save_model(self, epoch: int, batch: Any, logs: Any) -> None:
            written.append(self.filepath)
            super()._save_model(epoch, batch, logs)

    class Stops(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyboardInterrupt

    def files() -> list[Any]:
        return [
            Noted(f"{folder}/all.weights.h5", save_weights_only=True),
            Noted(f"{folder}/{ud.rank()}.weights.h5", save_weights_only=True),
            keras.callbacks.CSVLogger(f"{folder}/log.csv"),
            keras.callbacks.BackupAndRestore(f"{folder}/backup"),
        ]

    try:
        with pytest.raises(KeyboardInterrupt):
            fit(distributed(), *files(), Stops())
        own = [f"{folder}/{ud.rank()}.weights.h5"]
        assert written == ([f"{folder}/all.weights.h5", *own] if ud.rank() == 0 else own) * 2
        history = fit(distributed(), *files())
        assert len(history.history["loss"]) == 2, "the two epochs before were in the backup"
        ud.barrier()
        with open(f"{folder}/log.csv", encoding="utf-8") as file:
            assert len(file.readlines()) == 3, "a line for the head, and for each epoch"
        assert not os.path.exists(f"{folder}/backup")
    finally:
        ud.barrier()
        if ud.rank() == 0:
            shutil.rmtree(folder)


CASES = [
    logs_are_means,
    rates_are_lowered_alike,
    all_stop_together,
    early_stopping_restores_the_same_weights,
    a_rate_of_one_rank,
    weights_of_one_rank,
    weights_of_one_rank_within_an_epoch,
    weights_of_one_rank_between_steps,
    a_rate_of_one_rank_in_a_step,
    another_optimizer,
    an_optimizer_that_is_not_used,
    files_of_one_name_are_written_once,
]


def on_rank(case: str) -> None:
    """Run a case."""
    ud.init()
    try:
        next(each for each in CASES if each.__name__ == case)()
    finally:
        ud.shutdown()
