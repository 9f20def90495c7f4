"""`BestModelCheckpoint` of `horovod.keras.callbacks`: without an argument that `horovod.tensorflow.keras` has."""

from __future__ import annotations

from unidist_tensorflow.keras import callbacks as keras_callbacks


class BestModelCheckpoint(keras_callbacks.BestModelCheckpoint):
    """Saves the best model, not its weights alone. It must be given a path before training: `filepath`.

    Args:
        monitor: see `keras_callbacks.BestModelCheckpoint`, as all further arguments.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        *,
        filepath: str | None = None,
    ) -> None:
        super().__init__(monitor, verbose, False, mode, save_freq, filepath=filepath)
