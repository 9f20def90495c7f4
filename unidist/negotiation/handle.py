"""The submitter's view of a named operation under way."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from typing_extensions import override

from unidist.buffer import Buffer
from unidist.errors import UsageError
from unidist.negotiation.named import NamedHandle
from unidist.negotiation.request import Request

if TYPE_CHECKING:
    from unidist.negotiation.negotiator import Negotiator


class Handle(NamedHandle):
    """A submitted operation. Made by `Negotiator.submit`.

    Attributes:
        request: what was submitted.
        background: a background thread drives it; else it moves only while some thread waits.
        submitted: time of submission, of `time.monotonic`.
        deadline: time at which the wait for the other ranks ends; for the negotiator.
        reported: it was in a stall report; for the negotiator.
        ended: what `done` returns; set by the negotiator, after `error`, since a reader takes no lock.
        error: that ended it, or None.
    """

    __slots__ = (
        "_negotiator",
        "_output",
        "_rows",
        "background",
        "deadline",
        "ended",
        "error",
        "reported",
        "request",
        "submitted",
    )

    def __init__(self, negotiator: Negotiator, request: Request, *, background: bool, timeout_seconds: float) -> None:
        self.request = request
        self.background = background
        self.submitted = time.monotonic()
        self.deadline = self.submitted + timeout_seconds
        self.reported = False
        self._negotiator = negotiator
        self.ended = False
        self.error: BaseException | None = None
        self._output: Buffer = request.target
        self._rows: tuple[int, ...] = ()

    @override
    def done(self) -> bool:
        return self.ended

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for the operation. This thread drives the negotiation if no other does.

        After a StalledError nothing more can be submitted.
        """
        if not self.ended:
            self._negotiator.drive_until(self, timeout)
        if self.error is not None:
            raise self.error

    @property
    @override
    def result(self) -> Buffer:
        self._check_ended()
        return self._output

    @property
    @override
    def rows(self) -> tuple[int, ...]:
        self._check_ended()
        return self._rows

    # For the negotiator.

    def succeed(self, output: Buffer, rows: tuple[int, ...]) -> None:
        """Store the result, which is visible when this has ended."""
        self._output, self._rows = output, rows

    def renew(self, now: float, timeout_seconds: float) -> None:
        """Count the wait from `now` on: a rank that has joined waits as long as the others go on."""
        self.submitted = now
        self.deadline = now + timeout_seconds

    def _check_ended(self) -> None:
        if not self.ended:
            raise UsageError(
                f"{self.request.kind} {self.request.name!r} is under way; call wait() before reading its result"
            )
        if self.error is not None:
            raise self.error
