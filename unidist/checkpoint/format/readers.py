"""Readers of a series of checkpoints that want each of them, also those that the job removes (`save(keep=2)`).

A reader has a folder beside the series, `.NAME.reader-ID`, and touches it while it lives. Before a checkpoint is
removed, its files are linked into the folders of the readers.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import time
from pathlib import Path

_FRESH_SEC = 60.0


def reader_folder(series: Path, reader: str) -> Path:
    """Return the folder of a reader."""
    named = series.resolve()
    return named.with_name(f".{named.name}.reader-{reader}")


def hand_over(series: Path, checkpoint: Path) -> None:
    """Give a complete checkpoint of a series to its readers, as far as the file system has hard links."""
    anyone = reader_folder(series, "")
    for folder in anyone.parent.glob(f"{glob.escape(anyone.name)}*"):
        with contextlib.suppress(OSError, shutil.Error):
            if abs(time.time() - folder.stat().st_mtime) < _FRESH_SEC:
                link(checkpoint, folder)
            else:  # of one that was killed
                shutil.rmtree(folder)


def link(checkpoint: Path, folder: Path) -> None:
    """Make a checkpoint appear in another folder of the same file system, whole; nothing if it is there.

    Raises:
        OSError: that cannot be, or the checkpoint is being removed. So does shutil.Error.
    """
    target = folder / checkpoint.name
    if target.exists():
        return
    made = folder / f".{checkpoint.name}.{os.getpid()}"
    try:
        shutil.copytree(checkpoint, made, copy_function=os.link)
        made.rename(target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        if not target.exists():  # another process was faster
            raise
