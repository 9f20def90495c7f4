"""Progress reports of ranks: rates over the last seconds, and the history that the page draws as curves. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_WINDOW_SEC = 10.0
_MIN_SAMPLES = 3
_PATIENCE_SEC = 2.0
_MAX_VALUES = 16
_MAX_NAME = 40
NUM_POINTS = 240
NUM_CURVES = 16
"""The ranks whose waiting is kept as curves: the first ones."""


@dataclass(frozen=True)
class ProgressReport:
    """The latest report of a rank.

    Args:
        time: on the rank's clock, in seconds.
        steps: updates of its optimizers since `init()`.
        samples: that it has trained on since then; those of ranks with parts of one model are told by one of them.
        waited_sec: seconds in which it waited for other ranks.
        data_sec: seconds in which it waited for its batches.
        memory_bytes: resident memory of the process.
        values: of the script, by name; NaN and infinities are there, too.
    """

    time: float
    steps: int
    samples: int
    waited_sec: float
    data_sec: float
    memory_bytes: int
    values: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> ProgressReport | None:
        """Return a report; None if what was told makes no sense."""
        try:
            numbers = {name: float(told[name]) for name in ("time", "waited_sec")}
            numbers["data_sec"] = float(told.get("data_sec", 0.0))
            counts = {name: int(told[name]) for name in ("steps", "samples", "memory_bytes")}
            values = dict(list(told.get("values", {}).items())[:_MAX_VALUES])
            values = {str(name)[:_MAX_NAME]: float(value) for name, value in values.items()}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return None
        if not all(map(math.isfinite, numbers.values())):
            return None
        return cls(**numbers, **counts, values=values)  # type: ignore[arg-type]  # mypy takes the counts for floats


@dataclass(frozen=True)
class Rates:
    """Means over the last seconds: steps and samples per second; parts of the time, 0 to 1.

    Args:
        steps_per_sec: updates.
        samples_per_sec: of this rank.
        waiting: part of the time in which it waited for other ranks.
        reading: part of the time in which it waited for its batches.
    """

    steps_per_sec: float = 0.0
    samples_per_sec: float = 0.0
    waiting: float = 0.0
    reading: float = 0.0


class ProgressWindow:
    """The reports of one rank in the last seconds."""

    def __init__(self) -> None:
        self._reports: deque[tuple[float, ProgressReport]] = deque()

    @property
    def last(self) -> ProgressReport | None:
        """The newest report."""
        return self._reports[-1][1] if self._reports else None

    @property
    def has_rates(self) -> bool:
        """Whether enough is known for rates."""
        return len(self._reports) > 1

    def add(self, report: ProgressReport, now: float) -> None:
        """Take a report; one that counts from zero again begins a new window."""
        last = self.last
        if last is not None and (report.steps < last.steps or report.time < last.time):
            self._reports.clear()
        self._reports.append((now, report))
        while len(self._reports) > _MIN_SAMPLES and report.time - self._reports[1][1].time >= _WINDOW_SEC:
            self._reports.popleft()

    def rates(self, now: float) -> Rates:
        """Return the rates; zeros while too little is known, falling ones while the rank is silent."""
        if len(self._reports) < 2:
            return Rates()
        (_, first), (heard, last) = self._reports[0], self._reports[-1]
        seconds = last.time - first.time
        if seconds <= 0.0:
            return Rates()
        waiting = min(1.0, max(0.0, (last.waited_sec - first.waited_sec) / seconds))
        reading = min(1.0, max(0.0, (last.data_sec - first.data_sec) / seconds))
        usual = seconds / (len(self._reports) - 1)
        if now - heard > 2.0 * usual + _PATIENCE_SEC:
            seconds += now - heard
        return Rates((last.steps - first.steps) / seconds, (last.samples - first.samples) / seconds, waiting, reading)


class History:
    """Points of a job over its whole time. With too many, every second one goes, and later ones are further apart."""

    def __init__(self) -> None:
        self._points: list[dict[str, Any]] = []
        self._interval = 1.0
        self._next = -math.inf

    def is_due(self, elapsed: float) -> bool:
        """Return whether it is time for the next point."""
        return elapsed >= self._next

    def add(self, point: dict[str, Any]) -> None:
        """Take a point; `point["elapsed_sec"]` is its time."""
        self._points.append(point)
        if len(self._points) > NUM_POINTS:
            del self._points[::2]
            self._interval *= 2.0
        self._next = point["elapsed_sec"] + self._interval

    @property
    def points(self) -> list[dict[str, Any]]:
        """All of them, the oldest first."""
        return list(self._points)
