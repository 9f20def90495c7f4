"""Files that the callbacks of several ranks would write at the same time: rank 0 writes them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import keras

from unidist.negotiation import allgather_object
from unidist.runtime import context

__all__ = ["let_one_rank_write"]

_log = logging.getLogger("unidist")

_PATHS = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.TensorBoard: "log_dir",
    keras.callbacks.BackupAndRestore: "backup_dir",
}
"""The attribute of each callback of Keras that says where it writes."""


def let_one_rank_write(callbacks: Sequence[Any]) -> list[Any]:
    """Return this rank's callbacks without those that would write to a path that rank 0 writes to. Collective.

    Every rank still reads backups. A callback stays if rank 0 has none of its kind with the same path. For models that
    are whole on each rank: saving a divided one may need all ranks.

    Args:
        callbacks: of `fit`, on this rank.
    """
    own = [_written(each) for each in callbacks]
    everyone = allgather_object(
        context.current().operations(), [each for each in own if each], name="unidist.fit.files"
    )
    by_rank_0 = {tuple(each) for each in everyone[0]}
    if context.current().topology.rank == 0:
        return list(callbacks)
    found: list[Any] = []
    for callback, written in zip(callbacks, own, strict=True):
        if written is None or written not in by_rank_0:
            found.append(callback)
        elif isinstance(callback, keras.callbacks.BackupAndRestore):
            found.append(_Restores(callback))
        else:
            _log.debug("fit: rank 0 writes %s for %s", written[1], written[0])
    return found


def _written(callback: Any) -> tuple[str, str] | None:
    """Return the kind of a callback and its path; None: it is none of Keras' that write."""
    for kind, attribute in _PATHS.items():
        if isinstance(callback, kind) and (path := getattr(callback, attribute)):
            return kind.__name__, os.path.abspath(os.fspath(path))
    return None


class _Restores(keras.callbacks.Callback):
    """Reads a backup that rank 0 writes.

    Args:
        backup: this rank's callback.
    """

    def __init__(self, backup: Any) -> None:
        super().__init__()
        self._backup = backup

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the model."""
        self._backup.set_model(self.model)
        self._backup.set_params(self.params)
        self._backup.on_train_begin(logs)
