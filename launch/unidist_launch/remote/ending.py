"""The end of a job: the rank to blame, signals to the others, when they are killed, and the exit code."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

from unidist_launch.output.lines import Stream
from unidist_launch.output.screen import is_broken_pipe
from unidist_launch.output.writer import Output
from unidist_launch.remote import failure
from unidist_launch.remote.failure import RankExit

_HOPELESS_SEC = 10.0


class Ending:
    """Collects how ranks end and decides what follows from it.

    Args:
        grace_period: time between the first signal to all ranks and SIGKILL.
        signal_ranks: sends a signal to every rank that still runs; also called in a signal handler.
        host_of: the host of a rank, for the report.
        outlives_ranks: see `Job.outlives_ranks`.
    """

    def __init__(
        self,
        grace_period: timedelta,
        *,
        signal_ranks: Callable[[int], None],
        host_of: Callable[[int], str],
        outlives_ranks: bool = False,
    ) -> None:
        self._grace_sec = grace_period.total_seconds()
        self._signal_ranks = signal_ranks
        self._host_of = host_of
        self._outlives_ranks = outlives_ranks
        self._first_failure_at: float | None = None
        self._decide_at: float | None = None
        self._kill_at: float | None = None
        self._signals: list[int] = []
        self._reason = ""
        self.exits: list[RankExit] = []
        """How ranks ended, in the order in which it was seen."""

    @property
    def signals(self) -> Sequence[int]:
        """The signals that were meant for the job, in order; it grows."""
        return self._signals

    @property
    def has_begun(self) -> bool:
        """Return whether the ranks have been told to end."""
        return self._kill_at is not None

    @property
    def is_overdue(self) -> bool:
        """Return whether the ranks have had the time to end by themselves."""
        return self._kill_at is not None and time.monotonic() >= self._kill_at

    @property
    def is_hopeless(self) -> bool:
        """Return whether a rank hangs in the kernel, where even SIGKILL does not reach it."""
        return self._kill_at is not None and time.monotonic() >= self._kill_at + _HOPELESS_SEC

    def note(self, end: RankExit) -> bool:
        """Add the end of a rank to `exits`; returns whether it is lost and the others go on without it.

        Not without rank 0, and not if everybody was told to end, or a rank has failed already.
        """
        is_tolerated = self._outlives_ranks and end.is_lost and end.rank > 0 and not self.has_begun
        is_tolerated = is_tolerated and failure.choose_culprit(self.exits) is None
        self.exits.append(replace(end, tolerated=True) if is_tolerated else end)
        return is_tolerated

    def deadlines(self) -> list[float]:
        """Return the times at which `advance` has something to do, past ones left out."""
        now = time.monotonic()
        return [at for at in (self._decide_at, self._kill_at) if at is not None and at > now]

    def wait(
        self, selector: selectors.BaseSelector, output: Output, longest_sec: float, *also: float | None
    ) -> list[selectors.SelectorKey]:
        """Wait until something is ready, and return that; no longer than until the next deadline.

        Args:
            selector: of the launcher's loop.
            output: its deadline counts, too.
            longest_sec: longest wait.
            also: other deadlines.
        """
        now = time.monotonic()
        due = [at for at in (output.deadline(), *self.deadlines(), *also) if at is not None and at > now]
        return [key for key, _ in selector.select(max(0.0, min([longest_sec, *(at - now for at in due)])))]

    def on_signal(self, number: int) -> None:
        """The launcher got a signal: the ranks get it too; a second SIGINT kills. Also in a signal handler."""
        self._signals.append(number)
        if len(self._signals) > 1 and number == signal.SIGINT:
            self._kill_at = time.monotonic()
            self._signal_ranks(signal.SIGKILL)
        elif self._kill_at is None:
            self.begin(number)

    def begin(self, number: int) -> None:
        """Tell the ranks to end, by a signal."""
        self._kill_at = time.monotonic() + self._grace_sec
        self._signal_ranks(number)

    def fail(self, reason: str) -> None:
        """End the job, which cannot go on though no rank has failed; the reason is its report, the exit code 1."""
        if self._kill_at is None:
            self._reason = reason
            self.begin(signal.SIGTERM)

    def advance(self, output: Output) -> None:
        """End the other ranks once it is settled who failed, or nobody reads our output; kill what is overdue."""
        self._end_if_failed(output)
        lost = output.failures.get(Stream.STDOUT)
        if lost is not None and self._kill_at is None:
            if not is_broken_pipe(lost):
                output.message(f"unidist: cannot write to standard output: {lost}. Ending the job.")
            self.begin(signal.SIGTERM)

    def conclude(self, output: Output) -> int:
        """Write what is left of the ranks' output, then the report, and return the exit code."""
        culprit = None if self._reason else failure.choose_culprit(self.exits)
        if culprit is not None:
            output.blame(culprit.rank)
        output.finish()
        if self._reason:
            output.message(f"unidist: {self._reason}\nunidist: exit code 1")
            return 1
        if culprit is not None:
            output.message(failure.report(culprit, self.exits, culprit.host or self._host_of(culprit.rank)))
            return culprit.exit_code
        if self._signals:
            number = self._signals[0]
            output.message(f"unidist: ended by {signal.Signals(number).name}")
            return 128 + number
        lost = output.failures.get(Stream.STDOUT)
        if lost is not None:
            return 128 + signal.SIGPIPE if is_broken_pipe(lost) else 1
        return 0

    def _end_if_failed(self, output: Output) -> None:
        now = time.monotonic()
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._signal_ranks(signal.SIGKILL)
            return
        culprit = failure.choose_culprit(self.exits)
        if culprit is None:
            return
        if self._first_failure_at is None:
            self._first_failure_at = now
        self._decide_at = self._first_failure_at + failure.settle_seconds(self.exits)
        if now >= self._decide_at:
            output.blame(culprit.rank)
            self.begin(signal.SIGTERM)
