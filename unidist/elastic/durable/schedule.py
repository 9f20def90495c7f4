"""When the next durable checkpoint of an elastic job is due: at a fixed interval, or as often as little time is lost.

What a checkpoint costs is measured: the time in which training is held up, and by how much steps are slower while it
is written. The interval follows from it, `cost / AIM`, so that all checkpoints together take less than `MOST` of the
time. (Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9), 1974,
has sqrt(2 * cost * mean time between failures) as the optimum. How often a whole job is lost is not known here; that
interval can be given.) Pure.
"""

from __future__ import annotations

import statistics
from collections import deque
from datetime import timedelta

MOST = 0.035
"""The share of the time that checkpoints may take."""

AIM = 0.03
"""The share that is aimed at: costs vary."""

SHORTEST_SEC = 5.0
"""No interval that is chosen is shorter; and so long after the beginning the first checkpoint is made."""

PAUSE_AFTER_FAILURE_SEC = 60.0

_NUM_STEPS = 31
_NUM_COSTS = 4


class CheckpointSchedule:
    """Measures one process, and says when a checkpoint is due. Times are seconds of a monotonic clock.

    Every rank keeps one; that of rank 0 decides.

    Args:
        interval: fixed; None: chosen by what checkpoints cost.
    """

    def __init__(self, interval: timedelta | None = None) -> None:
        self._fixed = None if interval is None else interval.total_seconds()
        self._steps: deque[float] = deque(maxlen=_NUM_STEPS)
        self._costs: deque[float] = deque(maxlen=_NUM_COSTS)
        self._step_began: float | None = None
        self._held_up = self._slower = 0.0
        self._was_writing = False
        self._since: float | None = None
        self._not_before = 0.0

    @property
    def interval_sec(self) -> float:
        """Time from the beginning of one checkpoint to the next."""
        if self._fixed is not None:
            return self._fixed
        if not self._costs:
            return SHORTEST_SEC
        return max(SHORTEST_SEC, max(self._costs[-1], statistics.fmean(self._costs)) / AIM)

    def begin(self, now: float) -> None:
        """Note that training begins, or continues with other ranks: the time until now belongs to no step."""
        self._step_began, self._was_writing = now, False
        if self._since is None:
            self._since = self._not_before = now

    def step(self, now: float) -> None:
        """A step has ended, with a commit."""
        if self._step_began is not None:
            seconds = now - self._step_began
            if self._was_writing:
                self._note_slow(seconds)
            else:
                self._steps.append(seconds)
        self._step_began = now

    def is_due(self, now: float) -> bool:
        """Return whether a checkpoint is to be made at the commit that was just made."""
        return self._since is not None and now >= max(self._since + self.interval_sec, self._not_before)

    def saved(self, began: float, now: float) -> None:
        """A checkpoint was begun: training was held up from `began` to now, and the rest is written meanwhile."""
        self._held_up, self._slower = now - began, 0.0
        self._step_began, self._was_writing = now, True
        self._since = began

    def written(self) -> tuple[float, float]:
        """Note that the checkpoint is complete; return its cost: seconds of waiting, and of slower steps."""
        cost = self._held_up, self._slower
        self._costs.append(sum(cost))
        self._was_writing = False
        return cost

    def failed(self, now: float) -> None:
        """The checkpoint could not be written: the next attempt is not made at once."""
        self._was_writing = False
        self._not_before = now + PAUSE_AFTER_FAILURE_SEC

    def _note_slow(self, seconds: float) -> None:
        """Count by how much a step was longer than others are; one that evaluates, say, is not the checkpoint's."""
        if self._steps:
            usual = statistics.median(self._steps)
            self._slower += min(max(0.0, seconds - usual), usual)
