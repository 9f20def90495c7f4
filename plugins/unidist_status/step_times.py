"""Step times of a worker of an elastic job, from the last heartbeats of its generation. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from unidist.control.messages import StepTimeReport

_NUM_SAMPLES = 12
_PATIENCE_SEC = 2.0


@dataclass(frozen=True)
class StepTimes:
    """Means over the commits of a window.

    Args:
        commits: number of measured steps.
        own_sec: seconds of a step in which the rank did not wait for others.
        waited_sec: seconds in which it did.
    """

    commits: int
    own_sec: float
    waited_sec: float


class StepTimeWindow:
    """The last reports of one worker in its present generation, one for each beat in which it had got on."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, StepTimeReport]] = deque(maxlen=_NUM_SAMPLES)

    @property
    def last(self) -> StepTimeReport | None:
        """The newest report."""
        return self._samples[-1][1] if self._samples else None

    def add(self, report: StepTimeReport, now: float) -> None:
        """Take a report."""
        last = self.last
        if last is not None and last.generation != report.generation:
            self._samples.clear()
        elif last is not None and (last.commits, last.updates) == (report.commits, report.updates):
            return
        self._samples.append((now, report))

    def rates(self, now: float) -> tuple[float, float]:
        """Return commits and updates per second; zeros while too little is known."""
        if len(self._samples) < 2:
            return 0.0, 0.0
        (began, first), (ended, last) = self._samples[0], self._samples[-1]
        seconds = ended - began
        usual = seconds / (len(self._samples) - 1)
        if now - ended > 2.0 * usual + _PATIENCE_SEC:
            seconds = now - began  # it stands still
        if seconds <= 0.0:
            return 0.0, 0.0
        return (last.commits - first.commits) / seconds, (last.updates - first.updates) / seconds

    def times(self) -> StepTimes | None:
        """Return how long a step took; None while none was measured."""
        if not self._samples:
            return None
        first, last = self._samples[0][1], self._samples[-1][1]
        number = last.timed - first.timed
        if number <= 0:
            return None
        return StepTimes(number, (last.own_sec - first.own_sec) / number, (last.waited_sec - first.waited_sec) / number)
