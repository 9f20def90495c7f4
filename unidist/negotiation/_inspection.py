"""The stall inspector: reports operations that wait long, and ends the wait of those that wait too long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from unidist.errors import StalledError
from unidist.negotiation._stall import Situation, stall_line, stall_report, wanted_lines
from unidist.negotiation.handle import Handle

_log = logging.getLogger("unidist.negotiation")

Snapshot = tuple[Sequence[Handle], Situation]
"""The pending operations of this rank, and what it knows of those of the others."""


class StallInspector:
    """Looks at the pending operations of one rank whenever the watchdog calls `look`.

    Args:
        snapshot: returns the state of affairs; called from the watchdog's and the driver's thread.
        fail: ends all operations with an error.
        stall_check_seconds: age at which an operation is reported, once; infinite for never.
        timeout_seconds: the default time limit of operations, from their submission.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        fail: Callable[[StalledError], None],
        *,
        stall_check_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self._snapshot = snapshot
        self._fail = fail
        self._stall_check_seconds = stall_check_seconds
        self._shortest_limit = min(stall_check_seconds, timeout_seconds)

    def look(self, now: float) -> float:
        """Report or end what is due at time `now`, and return when something could be due next."""
        handles, situation = self._snapshot()
        if any(now >= handle.deadline for handle in handles):
            self._fail(self.error())
            return now + self._shortest_limit
        # Whatever is submitted from now on is not due before this.
        moments = [now + self._shortest_limit]
        for handle in handles:
            report_at = handle.submitted + self._stall_check_seconds
            if not handle.reported and now >= report_at:
                handle.reported = True
                _log.warning("%s", stall_line(handle.request, now - handle.submitted, situation))
            moments.append(handle.deadline if handle.reported else min(handle.deadline, report_at))
        return min(moments)

    def error(self, cause: StalledError | None = None) -> StalledError:
        """Return the error that says which ranks have and have not submitted what.

        Args:
            cause: what the communicator raised, where it was the one that saw the time run out.
        """
        handles, situation = self._snapshot()
        now = time.monotonic()
        lines = [stall_line(handle.request, now - handle.submitted, situation) for handle in handles]
        lines += wanted_lines({handle.request.name for handle in handles}, situation)
        missing = {rank for handle in handles for rank in situation.missing(handle.request.name)}
        report = stall_report(lines, situation.rank)
        error = StalledError(report if cause is None else f"{report} ({cause})", ranks=sorted(missing))
        error.__cause__ = cause
        return error
