"""`BackupAndRestore` without the class `Callback`: adapters mix it into that of the Keras that they bind."""

from __future__ import annotations

import os
import shutil
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unidist.checkpoint.format import directory
from unidist.errors import CheckpointError, UsageError
from unidist.negotiation.objects import gather_objects
from unidist.runtime import context

if TYPE_CHECKING:
    Callback: Any = object  # what the class is mixed into
else:
    Callback = object

__all__ = ["BacksUpTraining"]


class BacksUpTraining(Callback):
    """Saves the state of `fit` as it goes on, and resumes from it when the script is started again.

    As Keras' callback of this name, in a checkpoint of unidist: with any strategy, and another number of ranks may
    resume. Weights, optimizer and the number of the epoch are restored; an epoch that was not complete begins again.
    Every rank gives it, with the same arguments. An own folder for each training: it is removed at the end.

    Args:
        backup_dir: a folder in a file system that all ranks share.
        save_freq: "epoch": at the end of each epoch; or the number of batches between two backups, at least 1.
        double_checkpoint: keep the last two backups, for the case that the last one cannot be read.
        delete_checkpoint: remove the folder when `fit` is complete.

    Raises:
        UsageError: arguments that cannot be.
        CheckpointError: from `fit`, if a backup cannot be written, or none can be loaded.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: int | Literal["epoch"] = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__()
        path = os.fspath(backup_dir)
        if not path:
            raise UsageError("BackupAndRestore(backup_dir=''): give a folder that all ranks share")
        if save_freq != "epoch" and (isinstance(save_freq, bool) or not isinstance(save_freq, int) or save_freq < 1):
            raise UsageError(f"BackupAndRestore(save_freq={save_freq!r}): give 'epoch', or a number of batches")
        self.backup_dir = path
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self._number = 0  # of the last backup
        self._epoch = 0  # that is not complete
        self._batches = 0  # since the last backup
        self._last_batch = -1  # Keras calls with the last of several that it runs at once

    @abstractmethod
    def _save(self, path: str, *, step: int, keep: int, extra: dict[str, Any]) -> None:
        """Save the model and its optimizer by the adapter's `save`. Collective."""

    @abstractmethod
    def _load(self, path: str) -> dict[str, Any]:
        """Load them, and return what was given as `extra`. Collective."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the last backup, if there is one. Collective."""
        found = [(step, str(path)) for step, path in directory.steps(Path(self.backup_dir))]
        backups = context.current().broadcast_object(found, name="backups of fit")
        if backups:
            self._number = backups[-1][0]
            self._epoch = int(self._restored([path for _, path in backups])["epoch"])
            self.model._initial_epoch = self._epoch

    def _restored(self, paths: list[str]) -> dict[str, Any]:
        try:
            return self._load(paths[-1])
        except CheckpointError:  # on every rank
            if len(paths) == 1:
                raise
        return self._load(paths[-2])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save, if it is time to. Collective then."""
        self._batches += batch - self._last_batch if batch > self._last_batch else batch + 1
        self._last_batch = batch
        if self.save_freq != "epoch" and self._batches >= self.save_freq:
            self._back_up()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save, if that is done at the end of an epoch. Collective then."""
        self._epoch = epoch + 1
        if self.save_freq == "epoch":
            self._back_up()

    def _back_up(self) -> None:
        self._batches = 0
        self._number += 1
        keep = 2 if self.double_checkpoint else 1
        self._save(self.backup_dir, step=self._number, keep=keep, extra={"epoch": self._epoch})

    def on_train_end(self, logs: Any = None) -> None:
        """Remove the backups. Collective."""
        if not self.delete_checkpoint:
            return
        runtime = context.current()
        communicator = runtime.duplicate_world()
        gather_objects(communicator, None)  # all ranks have come out of their last save
        if runtime.topology.rank == 0:
            shutil.rmtree(self.backup_dir, ignore_errors=True)
        gather_objects(communicator, None)  # no rank looks for backups before they are gone
        communicator.close()
