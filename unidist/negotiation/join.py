"""Announces updates by name, so that a rank that has run out of data can take part in those of the others.

A rank that called `join` waits among the named operations, but an optimizer's gradients are exchanged outside of
them, over a separate communicator. So every update is announced by a named operation of one byte before
its exchange; on a joined rank the announcement runs the exchange, without gradients.
"""

from __future__ import annotations

from collections.abc import Callable

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp
from unidist.negotiation import NamedOperations, OperationKind, Request

_PREFIX = "update."


class Announcements:
    """The announcements of one process; every rank registers the same ones, in the same order.

    Args:
        operations: over all ranks.
    """

    def __init__(self, operations: NamedOperations) -> None:
        self._operations = operations
        self._take_part: list[Callable[[], None]] = []

    def register(self, take_part: Callable[[], None]) -> Announcement:
        """Return the next announcement.

        Args:
            take_part: does what an active rank does after `announce`, as one that has nothing to contribute.
        """
        name = f"{_PREFIX}{len(self._take_part)}"
        self._take_part.append(take_part)
        return Announcement(self._operations, name)

    def serve(self, name: str) -> None:
        """Take part in what was announced by the named operation `name`, if it is an announcement."""
        number = name.removeprefix(_PREFIX)
        if number != name and number.isdecimal():
            self._take_part[int(number)]()


class Announcement:
    """Says that an update comes. Made by `Announcements.register`."""

    def __init__(self, operations: NamedOperations, name: str) -> None:
        self._operations = operations
        flag = Buffer.allocate(1, DType.UINT8)
        self._request = Request(name, OperationKind.ALLREDUCE, flag, flag, (1,), ReduceOp.MAX)

    def announce(self) -> None:
        """Return when every rank has announced, or has joined. Collective.

        Raises:
            PeerLostError: a peer died.
            StalledError: a rank did not come; names it.
        """
        self._operations.submit(self._request).wait()
