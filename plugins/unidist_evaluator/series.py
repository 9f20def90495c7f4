"""The finished checkpoints of a series, each once and in order, also those that the job has removed meanwhile."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unidist.checkpoint.format import directory, readers
from unidist.errors import CheckpointError, UsageError

_POLL_SEC = 0.1


@dataclass(frozen=True)
class FinishedCheckpoint:
    """A complete checkpoint.

    Args:
        step: its number in the series.
        path: of a folder that stays until the next one is asked for.
    """

    step: int
    path: Path


class CheckpointSeries:
    """Reads a series of checkpoints while a job adds to it, and removes old ones. A context manager.

    A reader that is slower than the job gets them all the same: by hard links, see `checkpoint.format.readers`.

    Args:
        folder: of the series; it need not exist yet.
        after: number of the last checkpoint that is not wanted any more.
        reader: a name of this reader, by which another process can go on for it: if it is left early, what it is still
            to read is kept for a minute at least. Default: nobody goes on.

    Raises:
        UsageError: the folder is a checkpoint itself.
    """

    def __init__(self, folder: str | os.PathLike[str], *, after: int = -1, reader: str = "") -> None:
        self._folder = Path(folder)
        if directory.is_complete(self._folder):
            raise UsageError(
                f"{str(self._folder)!r} is one checkpoint; an evaluator reads a series: "
                "save(path, ..., step=N), and give the same path"
            )
        self._own = readers.reader_folder(self._folder, reader or str(os.getpid()))
        self._own.mkdir(parents=True, exist_ok=True)
        self._may_stay = bool(reader)
        self._after = after
        self._ended = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._stay_known, name="unidist-evaluator", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Take what is finished now as the last ones. From any thread."""
        self._ended.set()

    def __iter__(self) -> Iterator[FinishedCheckpoint]:
        while True:
            is_last_look = self._ended.is_set()  # before the look: what was finished until then is seen
            found = self._next()
            if found is None:
                if is_last_look:
                    self._may_stay = False
                    return
                self._ended.wait(_POLL_SEC)
                continue
            self._after = found.step
            yield found
            shutil.rmtree(self._own / found.path.name, ignore_errors=True)

    def __enter__(self) -> CheckpointSeries:
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()
        if not self._may_stay:
            shutil.rmtree(self._own, ignore_errors=True)

    def _next(self) -> FinishedCheckpoint | None:
        """Return the next one, where it stays; None if there is none yet.

        Raises:
            CheckpointError: it was removed before it was read.
        """
        # The series first: what is removed from it meanwhile is in the own folder by then.
        steps = sorted({step for folder in (self._folder, self._own) for step in _steps(folder) if step > self._after})
        for old in _steps(self._own):
            if old <= self._after:
                shutil.rmtree(directory.step_folder(self._own, old), ignore_errors=True)
        if not steps:
            return None
        own = directory.step_folder(self._own, steps[0])
        path = directory.step_folder(self._folder, steps[0])
        with suppress(OSError, shutil.Error):
            readers.link(path, self._own)
        if directory.is_complete(own):
            return FinishedCheckpoint(steps[0], own)
        if directory.is_complete(path):  # a file system without hard links
            return FinishedCheckpoint(steps[0], path)
        raise CheckpointError(
            f"checkpoint {steps[0]} of {str(self._folder)!r} was removed before it was evaluated, and this file system "
            "has no hard links to keep it by. Keep more: save(..., keep=N)"
        )

    def _stay_known(self) -> None:
        while not self._closed.wait(1.0):
            with suppress(OSError):
                os.utime(self._own)


def _steps(series: Path) -> list[int]:
    try:
        return [step for step, _ in directory.steps(series)]
    except OSError:  # it is being made, or removed
        return []
