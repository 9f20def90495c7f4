"""Finds the size of gradient buckets with which the updates of one optimizer take the least time (`--autotune`).

Framework-free. Rank 0 measures and decides, the others follow: a binding asks `due()` after each completed exchange, of
which every rank makes equally many, and where it is True tells all ranks what rank 0's `next_choice()` returned.
"""

from __future__ import annotations

import csv
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unidist.update import Update

_log = logging.getLogger("unidist.autotune")

SMALLEST_BYTES = 1 << 18
"""Smaller buckets cost more in latency than earlier exchange could save."""

_SETTLE, _MEASURED = 3, 12
"""Updates after a change that do not count (new memory is touched for the first time), and those that do."""

_BETTER = 0.98
"""A choice that needs more than this part of the best one's time is no improvement: so much is noise."""


class ClimbingSearch:
    """Looks for the choice of least cost among ordered ones: upwards as long as it helps, then downwards.

    Each choice is asked for once. It assumes that the cost falls towards the best one from both sides.

    Args:
        choices: in order, at least one.
        start: index of the first to try.
    """

    def __init__(self, choices: Sequence[int], start: int) -> None:
        self._choices = choices
        self._start = start
        self._at = start
        self._step = 1
        self._best = start
        self._costs: dict[int, float] = {}
        self.finished = False
        """No choice is left to try: `current` is the best one."""

    @property
    def current(self) -> int:
        """The choice whose cost is asked for next."""
        return self._choices[self._at]

    def tell(self, cost: float) -> None:
        """Take the cost of `current`, and go on to the next choice."""
        assert not self.finished, "the search is over"
        self._costs[self._at] = cost
        improved = self._at == self._start or cost < _BETTER * self._costs[self._best]
        if improved:
            self._best = self._at
        if self._go(self._at + self._step if improved else None):
            return
        if self._step > 0:
            self._step = -1
            # Where going up has helped, the best cannot lie below the start.
            if self._go(self._start - 1 if self._best == self._start else None):
                return
        self._at, self.finished = self._best, True

    def _go(self, index: int | None) -> bool:
        if index is None or not 0 <= index < len(self._choices):
            return False
        self._at = index
        return True


class BucketTuner:
    """Tunes the buckets of one optimizer.

    Args:
        total_bytes: of all gradients.
        bucket_bytes: the size with which training begins.
        log: file to which a line per size that was tried is appended (CSV), on rank 0; or None.
        clock: seconds.
    """

    def __init__(
        self, total_bytes: int, bucket_bytes: int, *, log: Path | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        choices = bucket_choices(total_bytes, bucket_bytes)
        self._search = ClimbingSearch(choices, choices.index(min(bucket_bytes, choices[-1])))
        self._total_bytes = total_bytes
        self._log = log
        self._clock = clock
        self._last: float | None = None
        self._times: list[float] = []
        self._num_updates = 0
        self._to_settle = _SETTLE
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            if not log.exists():
                self._write("gradient_bytes", "update", "bucket_bytes", "median_update_ms", "decision")

    def due(self) -> bool:
        """Note a completed exchange; say whether it is time for `next_choice`. Equal on every rank."""
        now = self._clock()
        if self._last is not None:
            if self._to_settle:
                self._to_settle -= 1
            else:
                self._times.append(now - self._last)
        self._last = now
        self._num_updates += 1
        return len(self._times) == _MEASURED

    def next_choice(self) -> tuple[int, bool]:
        """Return the size of buckets to use from now on, and whether it is final. For rank 0."""
        cost = statistics.median(self._times)
        tried = self._search.current
        self._search.tell(cost)
        chosen, final = self._search.current, self._search.finished
        decision = f"{'stay with' if final else 'try'} {chosen}"
        if self._log is not None:
            self._write(self._total_bytes, self._num_updates, tried, f"{1000 * cost:.3f}", decision)
        if final:
            _log.info("autotune: buckets of %d bytes (after %d updates)", chosen, self._num_updates)
        return chosen, final

    def restart(self) -> None:
        """Begin to measure anew: the choice is in use."""
        self._times.clear()
        self._to_settle = _SETTLE
        self._last = None

    def _write(self, *row: object) -> None:
        assert self._log is not None
        with self._log.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(row)


def tuner_for(update: Update) -> BucketTuner | None:
    """Return the tuner of an update's buckets, where the user asked for one and there is something to tune."""
    settings = update.context.settings
    if not settings.autotune or update.num_ranks == 1 or update.bucket_bytes is None:
        return None
    total = sum(info.count * info.dtype.itemsize for info in update.parameters)
    is_first = update.communicator.rank == 0
    return BucketTuner(total, update.bucket_bytes, log=settings.autotune_log if is_first else None)


def bucket_choices(total_bytes: int, bucket_bytes: int) -> list[int]:
    """Return sizes worth trying, ascending: `bucket_bytes` times powers of 2, as long as they make a difference."""
    choices = [bucket_bytes]
    while choices[-1] >= 2 * total_bytes and choices[-1] > SMALLEST_BYTES:  # one bucket holds everything
        choices = [choices[-1] // 2]
    while choices[0] // 2 >= SMALLEST_BYTES:
        choices.insert(0, choices[0] // 2)
    while choices[-1] < total_bytes:
        choices.append(2 * choices[-1])
    return choices
