"""Which rank the others wait for. Pure.

Ranks that exchange gradients take steps of the same length, however fast each of them is: the fast ones wait. What
tells them apart is the time in which they do not wait (`unidist.control.messages.StepTimeReport`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from unidist_status.step_times import StepTimes

FACTOR = 1.5
"""A rank is named when its own time is so many times the median of the others' ..."""
OVER_FACTOR = 1.25
"""... and is named until it is less than so many times."""
LEAST_SEC = 0.005
"""Differences of less per step are not worth a word."""
LEAST_COMMITS = 5


@dataclass(frozen=True)
class Straggler:
    """A worker that the others wait for.

    Args:
        worker: its number.
        own_sec: seconds per step in which it does not wait.
        others_sec: median of the others'.
    """

    worker: int
    own_sec: float
    others_sec: float

    @property
    def factor(self) -> float:
        """How many times as long."""
        return self.own_sec / max(self.others_sec, 1e-9)


class StragglerWatch:
    """Follows one generation after another."""

    def __init__(self) -> None:
        self.current: Straggler | None = None
        self._suspect: int | None = None

    def reset(self) -> None:
        """Start over with another set of ranks."""
        self.current = self._suspect = None

    def update(self, times: Mapping[int, StepTimes | None]) -> Straggler | None:
        """Look at the times of all ranks; returns one that is named now and was not before.

        A rank is named when two looks in a row, at new data, find it slow.

        Args:
            times: by worker, of all members; None where too little is known.
        """
        known = {number: each for number, each in times.items() if each is not None and each.commits >= LEAST_COMMITS}
        if len(known) < 2 or len(known) < len(times):
            return None
        slowest = _compare(known, max(known, key=lambda number: known[number].own_sec))
        current = self.current
        if current is not None and current.worker in known:
            now = _compare(known, current.worker)
            if now.factor >= OVER_FACTOR and now.own_sec - now.others_sec >= LEAST_SEC:
                self.current = now
                return None
        self.current = None
        if slowest.factor < FACTOR or slowest.own_sec - slowest.others_sec < LEAST_SEC:
            self._suspect = None
            return None
        if self._suspect != slowest.worker:
            self._suspect = slowest.worker
            return None
        self.current = slowest
        return slowest


def _compare(times: Mapping[int, StepTimes], worker: int) -> Straggler:
    others = statistics.median(each.own_sec for number, each in times.items() if number != worker)
    return Straggler(worker, times[worker].own_sec, others)
