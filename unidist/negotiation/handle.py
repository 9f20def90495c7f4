"""The submitter's view of a named operation under way."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from unidist.buffer import Buffer
from unidist.errors import UsageError
from unidist.negotiation.request import Request

if TYPE_CHECKING:
    from unidist.negotiation.negotiator import Negotiator


class Handle:
    """A submitted operation. Made by `Negotiator.submit`.

    Attributes:
        request: what was submitted.
        background: a background thread drives it; else it moves only while some thread waits.
        submitted: time of submission, of `time.monotonic`.
        deadline: time at which the wait for the other ranks ends; for the negotiator.
        reported: it was in a stall report; for the negotiator.
    """

    __slots__ = (
        "_complete",
        "_error",
        "_negotiator",
        "_output",
        "_rows",
        "background",
        "deadline",
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
        self._complete = False
        self._error: BaseException | None = None
        self._output: Buffer = request.target
        self._rows: tuple[int, ...] = ()

    def done(self) -> bool:
        """Say whether the operation has ended, well or not. Never blocks."""
        return self._complete

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when the operation is complete; this thread does the work of agreeing and moving if no other does.

        Args:
            timeout: longest wait; default: the communicator's timeout, counted from the submission.

        Raises:
            MismatchError: the ranks asked for different things under this name. Raised on every rank; other
                operations are not affected.
            PeerLostError: a peer died, or the negotiator was closed.
            StalledError: the timeout ran out; says which ranks have and have not submitted what. Nothing more
                can be submitted afterwards.
        """
        if not self._complete:
            self._negotiator.drive_until(self, timeout)
        if self._error is not None:
            raise self._error

    @property
    def result(self) -> Buffer:
        """The output: the request's target, or what its `allocate_output` returned. After `wait` only."""
        self._check_ended()
        return self._output

    @property
    def rows(self) -> tuple[int, ...]:
        """All-gather and all-to-all: rows of the output that came from each rank. After `wait` only."""
        self._check_ended()
        return self._rows

    # For the negotiator.

    def succeed(self, output: Buffer, rows: tuple[int, ...]) -> None:
        """Store the result; `finish` makes it visible."""
        self._output, self._rows = output, rows

    def finish(self, error: BaseException | None = None) -> None:
        """Make the end visible to `done` and `wait`. The error is stored first: a reader takes no lock."""
        self._error = error
        self._complete = True

    def _check_ended(self) -> None:
        if not self._complete:
            raise UsageError(
                f"{self.request.kind} {self.request.name!r} is under way; call wait() before reading its result"
            )
        if self._error is not None:
            raise self._error
