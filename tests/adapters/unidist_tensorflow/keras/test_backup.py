"""`BackupAndRestore`: an interrupted `fit` ends with the weights of one that was not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from _keras_training import CLASSES, FEATURES, difference, network, runtime, values

import unidist.keras as hvd
import unidist.tensorflow as ud
from unidist.errors import CheckpointError, UsageError
from unidist.jobs.pool.pool import RankPool

Pool = Callable[..., RankPool]
EPOCHS = 4


class _Interruption(keras.callbacks.Callback):
    def __init__(self, epoch: int, batch: int) -> None:
        super().__init__()
        self._place, self._epoch = (epoch, batch), 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self._epoch, batch) == self._place:
            raise InterruptedError


def _fit(strategy: str, callbacks: list[Any]) -> tuple[list[int], Any]:
    """Train a new model; return the epochs that it saw and its whole weights."""
    generator = np.random.default_rng(100 + ud.rank())
    x, y = generator.normal(size=(32, FEATURES)), generator.integers(CLASSES, size=32)
    model, optimizer = ud.distribute(network(), keras.optimizers.Adam(0.01), strategy=strategy)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    history = model.fit(x, y, batch_size=8, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    if "zero=3" in strategy:
        import unidist_zero

        with unidist_zero.gathered(model):
            return history.epoch, values(model)
    return history.epoch, values(model)


@pytest.mark.parallel
@pytest.mark.parametrize(
    "strategy",
    ["data", "zero=1", *(pytest.param(each, marks=pytest.mark.soak) for each in ("accumulate=2", "zero=3"))],
)
def test_an_interrupted_fit_resumes(pool: Pool, tmp_path: Path, strategy: str) -> None:
    def on_rank() -> None:
        with runtime("float64"):
            _, undisturbed = _fit(strategy, [])
            for number, (save_freq, again) in enumerate({"epoch": [2, 3], 3: [1, 2, 3]}.items()):
                folder = tmp_path / str(number)
                backup = hvd.callbacks.BackupAndRestore(folder, save_freq)
                with pytest.raises(InterruptedError):
                    _fit(strategy, [backup, _Interruption(2, 1 if save_freq == "epoch" else 0)])
                assert list(folder.iterdir())
                epochs, found = _fit(strategy, [hvd.callbacks.BackupAndRestore(folder, save_freq)])
                assert epochs == again
                if save_freq == "epoch":
                    assert difference(found, undisturbed) < 1e-12
                assert not folder.exists()

    pool(2).run(on_rank)


@pytest.mark.parallel
def test_the_backup_before_the_last_is_taken_if_that_is_damaged(pool: Pool, tmp_path: Path) -> None:
    def on_rank() -> None:
        with runtime("float64"):
            _, undisturbed = _fit("data", [])
            backup = hvd.callbacks.BackupAndRestore(tmp_path, double_checkpoint=True)
            with pytest.raises(InterruptedError):
                _fit("data", [backup, _Interruption(3, 0)])
            assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
            ud.barrier()
            if ud.rank() == 0:
                for each in (tmp_path / "step-00000003").rglob("*.safetensors"):
                    each.write_bytes(b"damaged")
            ud.barrier()
            with pytest.raises(CheckpointError):
                ud.load(tmp_path / "step-00000003", network())
            backup = hvd.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
            epochs, found = _fit("data", [backup])
            assert epochs == [2, 3]
            assert difference(found, undisturbed) < 1e-12
            ud.barrier()
            assert len(list(tmp_path.iterdir())) == 1

    pool(2).run(on_rank)


@pytest.mark.parametrize(
    "arguments", [{"backup_dir": ""}, {"save_freq": 0}, {"save_freq": True}, {"save_freq": "batch"}]
)
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="BackupAndRestore"):
        hvd.callbacks.BackupAndRestore(**{"backup_dir": "folder", **arguments})
