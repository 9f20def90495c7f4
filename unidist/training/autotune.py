"""Finds how the updates of one optimizer take the least time (`--autotune`): bucket size, then cycle time.

Framework-free. Rank 0 measures and decides, the others follow: a binding asks `due()` after each completed exchange, of
which every rank makes equally many, and where it is True tells all ranks what rank 0's `next_choice()` returned.
"""

from __future__ import annotations

import csv
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from unidist.optim.update import Update
from unidist.runtime import context

T = TypeVar("T")
_log = logging.getLogger("unidist.autotune")

SMALLEST_BYTES = 1 << 18
"""Smaller buckets cost more in latency than earlier exchange could save."""

_SETTLE, _MEASURED = 3, 12
"""Updates after a change that do not count (new memory is touched for the first time), and those that do."""

CYCLE_TIMES_MS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Cycle times worth trying."""

_BETTER = 0.98
"""A choice that needs more than this part of the best one's time is no improvement: so much is noise."""


class ClimbingSearch(Generic[T]):
    """Looks for the choice of least cost among ordered ones: upwards as long as it helps, then downwards.

    Each choice is asked for once. It assumes that the cost falls towards the best one from both sides.

    Args:
        choices: in order, at least one.
        start: index of the first to try.
    """

    def __init__(self, choices: Sequence[T], start: int) -> None:
        self._choices = choices
        self._start = start
        self._at = start
        self._step = 1
        self._best = start
        self._costs: dict[int, float] = {}
        self.finished = False
        """No choice is left to try: `current` is the best one."""

    @property
    def current(self) -> T:
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


@dataclass(frozen=True)
class Choice:
    """The settings to use from now on.

    Args:
        bucket_bytes: size of gradient buckets.
        cycle_time_ms: longest pause between two rounds of negotiation; None if it cannot be chosen.
        final: no other choice will follow.
    """

    bucket_bytes: int
    cycle_time_ms: float | None
    final: bool = False


class Tuner:
    """Tunes the updates of one optimizer: the size of its buckets, and then, at this size, the cycle time.

    The cycle time is tried only if this rank has paused between rounds of negotiation in the updates before: else it
    changes nothing.

    Args:
        total_bytes: of all gradients.
        start: what training begins with.
        num_pauses: says how often this rank has paused between rounds of negotiation so far.
        log: file to which a line per choice that was tried is appended (CSV), on rank 0; or None.
        clock: seconds.
    """

    def __init__(
        self,
        total_bytes: int,
        start: Choice,
        *,
        num_pauses: Callable[[], int] = lambda: 0,
        log: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        choices = bucket_choices(total_bytes, start.bucket_bytes)
        self._buckets = ClimbingSearch(choices, choices.index(min(start.bucket_bytes, choices[-1])))
        self._cycles: ClimbingSearch[float] | None = None
        self._cycle_time_ms = start.cycle_time_ms
        self._num_pauses = num_pauses
        self._pauses_before = num_pauses()
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
                self._write("gradient_bytes", "update", "bucket_bytes", "cycle_time_ms", "median_update_ms", "decision")

    def due(self) -> bool:
        """Note a completed exchange; return whether it is time for `next_choice`. Equal on every rank."""
        now = self._clock()
        if self._last is not None:
            if self._to_settle:
                self._to_settle -= 1
            else:
                self._times.append(now - self._last)
        self._last = now
        self._num_updates += 1
        return len(self._times) == _MEASURED

    def next_choice(self) -> Choice:
        """Return what to use from now on. For rank 0."""
        cost = statistics.median(self._times)
        tried = self._choice()
        if self._cycles is None:
            self._buckets.tell(cost)
            if self._buckets.finished and self._pauses():
                self._begin_cycles(cost if self._buckets.current == tried.bucket_bytes else None)
        else:
            self._cycles.tell(cost)
        chosen = self._choice()
        if self._log is not None:
            decision = f"{'stay with' if chosen.final else 'try'} {_in_words(chosen)}"
            row = (tried.bucket_bytes, tried.cycle_time_ms, f"{1000 * cost:.3f}", decision)
            self._write(self._total_bytes, self._num_updates, *row)
        if chosen.final:
            _log.info("autotune: %s (after %d updates)", _in_words(chosen), self._num_updates)
        return chosen

    def restart(self) -> None:
        """Start a new measurement, when the choice is in use."""
        self._times.clear()
        self._to_settle = _SETTLE
        self._last = None

    def _choice(self) -> Choice:
        if self._cycles is None:
            return Choice(self._buckets.current, self._cycle_time_ms, self._buckets.finished)
        return Choice(self._buckets.current, self._cycles.current, self._cycles.finished)

    def _pauses(self) -> bool:
        return self._cycle_time_ms is not None and self._num_pauses() > self._pauses_before

    def _begin_cycles(self, cost: float | None) -> None:
        """Go on to the cycle time; `cost` is that of the present one with the chosen buckets, where it is known."""
        present = self._cycle_time_ms
        assert present is not None
        choices = sorted({*CYCLE_TIMES_MS, present})
        self._cycles = ClimbingSearch(choices, choices.index(present))
        if cost is not None:
            self._cycles.tell(cost)

    def _write(self, *row: object) -> None:
        assert self._log is not None
        with self._log.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(row)


def tuner_for(update: Update) -> Tuner | None:
    """Return the tuner of an update, where the user asked for one and there is something to tune."""
    runtime = context.current()
    if not runtime.settings.autotune or update.num_ranks == 1 or update.bucket_bytes is None:
        return None
    total = sum(info.count * info.dtype.itemsize for info in update.parameters)
    named = runtime.negotiator
    cycle_time = named.cycle_time
    start = Choice(update.bucket_bytes, None if cycle_time is None else cycle_time / timedelta(milliseconds=1))
    log = runtime.settings.autotune_log if update.communicator.rank == 0 else None
    return Tuner(total, start, num_pauses=lambda: named.num_pauses, log=log)


def apply(choice: Choice, update: Update) -> bool:
    """Use a choice on this rank. Collective; says whether every `buffer` of the update is another one now."""
    if choice.cycle_time_ms is not None:
        context.current().negotiator.set_cycle_time(timedelta(milliseconds=choice.cycle_time_ms))
    if choice.bucket_bytes == update.bucket_bytes:
        return False
    update.set_bucket_bytes(choice.bucket_bytes)
    return True


def _in_words(choice: Choice) -> str:
    cycle = "" if choice.cycle_time_ms is None else f", cycle time {choice.cycle_time_ms:g} ms"
    return f"buckets of {choice.bucket_bytes} bytes{cycle}"


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
