"""The options of a save, and the handle by which its result is awaited."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from unidist.checkpoint.agreement import DiskError
from unidist.checkpoint.format import directory
from unidist.errors import CheckpointError, UsageError

OnError = Literal["raise", "warn"]


@dataclass(frozen=True)
class SaveOptions:
    """Options of a save, the same on every rank.

    Args:
        path: folder of the checkpoint, or with `step` of the series.
        step: number of the checkpoint in a series; None: `path` is the checkpoint itself.
        keep: number of complete checkpoints of the series to keep, up to this step; None keeps all.
        asynchronous: return when the state is copied, and write in the background.
        on_error: if writing fails: "raise", or "warn" and continue without this checkpoint.
    """

    path: Path
    step: int | None = None
    keep: int | None = None
    asynchronous: bool = False
    on_error: OnError = "raise"

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "warn"):
            raise UsageError(f"on_error={self.on_error!r}; choices: 'raise', 'warn'")
        if self.step is not None and self.step < 0:
            raise UsageError(f"step={self.step}: give 0 or more")
        if self.keep is not None and self.keep < 1:
            raise UsageError(f"keep={self.keep}: give at least 1, or None to keep all")
        if self.keep is not None and self.step is None:
            raise UsageError(
                f"keep={self.keep} without step=: only of a series of checkpoints some are kept. Give the number of "
                "this one in the series"
            )

    @property
    def target(self) -> Path:
        """The folder of the checkpoint itself."""
        return self.path if self.step is None else directory.step_folder(self.path, self.step)


class SaveHandle:
    """A save that was started, and perhaps is complete.

    Attributes:
        path: the folder of the checkpoint.
        error: why there is no checkpoint, once `done`; None if all is well.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: Exception | None = None
        self.on_error: OnError = "raise"
        self._reported = False
        self._ended = threading.Event()

    def done(self) -> bool:
        """Return whether it has ended, well or not. Never blocks."""
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when the checkpoint is complete and can be loaded.

        Args:
            timeout: longest wait; default: as long as the communicator waits for its peers.

        Raises:
            CheckpointError: it could not be saved, on this or another rank, and `on_error` is "raise"; or the timeout
                ran out, and the save goes on.
            PeerLostError: a rank was lost.
        """
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            seconds = 0.0 if timeout is None else timeout.total_seconds()
            raise CheckpointError(f"{self.path} was not complete after {seconds:g} s; it is still being saved")
        error = self.take_error()
        if error is not None:
            raise error

    def take_error(self) -> Exception | None:
        """Return the error for the caller to report, only once. None if there is none or it is to be a warning."""
        reported, self._reported = self._reported, True
        if reported or (isinstance(self.error, DiskError) and self.on_error == "warn"):
            return None
        return self.error

    def end(self, error: Exception | None = None) -> None:
        """Note how it ended."""
        self.error = error
        self._ended.set()
