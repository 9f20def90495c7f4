"""Waiting with a deadline, which Horovod lacks: for its operations, and for messages."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from typing_extensions import override

from unidist.communicator import Work
from unidist.errors import MismatchError
from unidist_horovod.bindings.interface import OperationFailed, Pending
from unidist_horovod.engine.links import Outgoing
from unidist_horovod.engine.mailbox import Receipt

if TYPE_CHECKING:
    from unidist_horovod.engine.group import HorovodGroup

_SPIN_SEC = 0.005
"""Horovod looks for work every millisecond; within this time the wait gives way instead of sleeping."""
_LOOK_EVERY = 16
_NAP_SEC = 1e-4
_ARRIVED_SEC = 0.1
"""A rank that waits longer than this tells its peers that it has arrived, so that they know who is missing."""
_GRACE_SEC = 0.5
"""For so long after a peer has left, operations that Horovod still completes count; then they are given up."""


class HorovodWork(Work):
    """Operations of one collective that Horovod was given.

    Args:
        communicator: whose.
        what: the operation, in words, for messages.
        number: of this collective in its communicator, the same on all ranks.
        pendings: what Horovod was given.
        finish: called when all are done.
        patient: a wait that takes too long raises TimeoutError and ends nothing.
    """

    def __init__(
        self,
        communicator: HorovodGroup,
        what: str,
        number: int,
        pendings: list[Pending],
        finish: Callable[[], None] | None = None,
        *,
        patient: bool = False,
    ) -> None:
        self._communicator = communicator
        self._what = what
        self._number = number
        self._pendings = pendings
        self._finish = finish
        self._patient = patient
        self._error: BaseException | None = None

    @override
    def done(self) -> bool:
        communicator = self._communicator
        if self._error is not None or not self._pendings or communicator.is_broken:
            return True
        if all(pending.done() for pending in self._pendings):
            return True
        communicator.links.drive()
        return False

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        if self._error is not None:
            raise self._error
        if not self._pendings:
            return
        try:
            self._complete(self._communicator.timeout if timeout is None else timeout)
        except BaseException as exc:
            self._error = exc
            raise

    def settle(self, limit: timedelta) -> None:
        """Wait until Horovod has ended the operations, without looking at their outcome. Raises as `wait` does."""
        for pending in self._pendings:
            self._wait_for(pending, limit)

    def _complete(self, limit: timedelta) -> None:
        communicator = self._communicator
        self.settle(limit)
        pendings, self._pendings = self._pendings, []
        error: OperationFailed | None = None
        for pending in pendings:
            try:
                pending.finish()
            except OperationFailed as exc:
                error = error or exc
        if error is not None:
            raise communicator.translated(self._what, error) from None
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def _wait_for(self, pending: Pending, limit: timedelta) -> None:
        communicator = self._communicator
        communicator.check_alive(self._what)
        if pending.done():
            return
        begin = time.monotonic()
        deadline = begin + limit.total_seconds()
        told = False
        lost_at = 0.0
        turn = 0
        while not pending.done():
            now = time.monotonic()
            turn += 1
            if now - begin < _SPIN_SEC:
                pending.pause()
                if turn % _LOOK_EVERY:
                    continue
                communicator.links.drive()
            elif now - begin < _ARRIVED_SEC:
                communicator.links.drive()
                time.sleep(_NAP_SEC)
            else:
                communicator.links.drive(0.001)
            communicator.check_alive(self._what)
            if not told and self._number >= 0 and now - begin >= _ARRIVED_SEC:
                told = True
                communicator.tell_arrival(self._number)
            if communicator.lost_members():
                lost_at = lost_at or now
                if now - lost_at > _GRACE_SEC:
                    raise communicator.lost_error(self._what)
            if now > deadline and not pending.done():
                if self._patient:
                    raise TimeoutError
                raise communicator.stalled_error(self._what, communicator.absent(self._number), limit)
        if told:
            communicator.waits_no_more()


class _MessageWork(Work):
    """A message under way between this rank and `peer` (of the group)."""

    def __init__(self, communicator: HorovodGroup, what: str, peer: int) -> None:
        self._communicator = communicator
        self._what = what
        self._peer = peer

    @abstractmethod
    def _ended(self) -> bool:
        """Return whether the message has been moved."""

    @override
    def done(self) -> bool:
        if self._ended() or self._communicator.is_broken:
            return True
        self._communicator.links.drive()
        return self._ended()

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        communicator = self._communicator
        limit = communicator.timeout if timeout is None else timeout
        begin = time.monotonic()
        while not self._ended():
            communicator.check_alive(self._what)
            waited = time.monotonic() - begin
            communicator.links.drive(0.0 if waited < _NAP_SEC else 0.005)
            if self._ended():
                break
            if self._peer in communicator.lost_members():
                raise communicator.lost_error(self._what)
            if waited > limit.total_seconds():
                raise communicator.stalled_error(self._what, (self._peer,), limit)


class SendWork(_MessageWork):
    """A message on its way out."""

    def __init__(self, communicator: HorovodGroup, what: str, peer: int, message: Outgoing) -> None:
        super().__init__(communicator, what, peer)
        self._message = message

    def _ended(self) -> bool:
        return self._message.sent


class ReceiveWork(_MessageWork):
    """A message on its way in."""

    def __init__(self, communicator: HorovodGroup, what: str, peer: int, receipt: Receipt) -> None:
        super().__init__(communicator, what, peer)
        self._receipt = receipt

    def _ended(self) -> bool:
        return self._receipt.complete

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        super().wait(timeout)
        found, wanted = self._receipt.found, len(self._receipt.view)
        if found != wanted:
            raise MismatchError(
                f"{self._what} on rank {self._communicator.rank}: it receives {wanted} bytes, but the message of rank "
                f"{self._peer} has {found}; make both sizes the same"
            )
