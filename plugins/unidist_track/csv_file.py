"""A record as a file of comma-separated values."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from unidist_track.tracker import TrackedJob, Tracker

_COLUMNS = ("step", "time", "name", "value")


class CsvFile(Tracker):
    """Appends a row for each value: step, time, name, value. So values may come and go without new columns.

    Args:
        target: the file; its folder is made. Rows are added to a file that is there, as a job started again does.
        job: not recorded.
    """

    def __init__(self, target: str, job: TrackedJob) -> None:
        path = Path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists() or not path.stat().st_size
        self._file = path.open("a", newline="", encoding="utf-8")
        self._rows = csv.writer(self._file)
        if is_new:
            self._rows.writerow(_COLUMNS)

    @override
    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        self._rows.writerows((step, f"{time:.3f}", name, repr(value)) for name, value in values.items())
        self._file.flush()

    @override
    def close(self, exit_code: int | None) -> None:
        self._file.close()
