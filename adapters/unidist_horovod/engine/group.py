"""One group of ranks on Horovod: its members, the notices of its peers, its end, and the errors to raise then."""

from __future__ import annotations

import os
import time
from abc import ABC
from collections.abc import Sequence
from datetime import timedelta

from typing_extensions import override

from unidist.buffer import Buffer, DType
from unidist.communicator import Capabilities, Communicator, ReportsArrivals, format_ranks
from unidist.errors import MismatchError, PeerLostError, StalledError, UnidistError, UsageError
from unidist_horovod.bindings.interface import OperationFailed
from unidist_horovod.engine import process as processes
from unidist_horovod.engine.links import Links, PacketKind
from unidist_horovod.engine.mailbox import Mailbox
from unidist_horovod.engine.process import HorovodProcess

_CAPABILITIES = Capabilities(dtypes=frozenset(DType), negotiates=True)
_NAMING_SEC = 1.0
"""Horovod may notice a death a moment before its connection says whose it was."""
_ALIGNMENT = 64
_LEAVE = timedelta(seconds=2)
_MISMATCHES = ("Mismatched ", "is not supported with Join")


class HorovodGroup(Communicator, ReportsArrivals, ABC):
    """A communicator over Horovod, apart from its operations.

    Args:
        process: the running Horovod.
        links: the connections to the other ranks.
        name: equal on all ranks of the group, and used by no other.
        members: world ranks, in the order of the group.
        rank: of this process in the group.
        process_set: Horovod's id for these members.
        timeout: of every operation.
        is_world: it owns `process` and `links`, and gives them back.

    Attributes:
        order: group ranks in the order of the process set, which is that of the world.
        is_in_order: that order is the group's own.
        mailbox: the notices and messages of the peers.
    """

    def __init__(
        self,
        process: HorovodProcess,
        links: Links,
        name: str,
        members: tuple[int, ...],
        rank: int,
        process_set: int,
        timeout: timedelta,
        *,
        is_world: bool = False,
    ) -> None:
        self.rank, self.size, self.members = rank, len(members), members
        self.timeout = timeout
        self.capabilities = _CAPABILITIES
        self.description = f"horovod, ranks {format_ranks(members)}"
        self.process, self.links, self.name = process, links, name
        self.process_set = process_set
        self._is_world = is_world
        self.order = sorted(range(self.size), key=members.__getitem__)
        self.is_in_order = self.order == list(range(self.size))
        self._waiting_in = -1
        self._closed = False
        self.mailbox = Mailbox()
        links.open(name, self.mailbox)

    @override
    def allocate(self, nbytes: int) -> Buffer:
        """Return memory aligned as TensorFlow wants it, which would copy it otherwise."""
        memory = Buffer.allocate(nbytes + _ALIGNMENT, DType.UINT8)
        return memory.slice(-memory.address % _ALIGNMENT, nbytes)

    @override
    def abort(self, reason: str) -> None:
        """Abort, and tell the peers why."""
        text = f"rank {self.rank} aborted: {reason or 'no reason given'}"
        first = not self.mailbox.aborted
        self.mailbox.abort(text)
        if first and not self._closed:
            self.tell(PacketKind.ABORT, payload=text.encode())

    @override
    def close(self) -> None:
        """Close; the last communicator of the process stops Horovod."""
        if self._closed:
            return
        self._closed = True
        self.links.shut(self.name)
        if self._is_world and os.getpid() == self.process.pid:
            if self.process.num_users == 1 and not self.process.failure and not self.mailbox.aborted:
                # When one rank stops Horovod it stops on all, though some may have work left without this one.
                self.links.leave(_LEAVE)
            self.links.close()
            processes.release(self.process)

    # For works

    @property
    def is_broken(self) -> bool:
        """Return whether every wait would raise."""
        return bool(self.mailbox.aborted or self.process.failure or self._closed)

    def check_alive(self, what: str) -> None:
        """Raise if operations can no longer complete."""
        if self.mailbox.aborted:
            by = self.mailbox.aborted_by
            raise PeerLostError(
                f"{what} on rank {self.rank}: this communicator was aborted ({self.description}): "
                f"{self.mailbox.aborted}",
                ranks=(self.members.index(by),) if by in self.members else (),
            )
        if self.process.failure:
            raise self.lost_error(what)
        if self._closed:
            raise UsageError(f"{what}: this communicator is closed ({self.description})")

    def lost_members(self) -> tuple[int, ...]:
        """Return the group ranks whose connections have ended."""
        gone = self.links.gone
        return tuple(rank for rank, member in enumerate(self.members) if member in gone) if gone else ()

    def tell(self, kind: PacketKind, value: int = 0, payload: bytes = b"") -> None:
        """Send a notice to all other members."""
        for member in self.members:
            self.links.notify(member, self.name, kind, value, payload)

    def tell_arrival(self, number: int) -> None:
        """Tell the others that this rank waits in collective `number`."""
        self._waiting_in = number
        self.tell(PacketKind.ARRIVED, number)

    def waits_no_more(self) -> None:
        """Note that the collective that `tell_arrival` was called for is complete."""
        self._waiting_in = -1

    def absent(self, number: int) -> tuple[int, ...]:
        """Return the group ranks that have not reported to wait in collective `number`."""
        arrived = self.mailbox.arrived(number)
        return tuple(rank for rank, member in enumerate(self.members) if rank != self.rank and member not in arrived)

    @override
    def waiting_for(self) -> Sequence[int]:
        return self.absent(self._waiting_in) if self._waiting_in >= 0 else ()

    def translated(self, what: str, error: OperationFailed) -> UnidistError:
        """Return our error for one of Horovod's."""
        text = str(error)
        if any(each in text for each in _MISMATCHES):
            return MismatchError(f"{what} on rank {self.rank} ({self.description}): {text}")
        if not self.process.failure:
            self.process.failure = text
        return self.lost_error(what)

    def lost_error(self, what: str) -> PeerLostError:
        """Return the error for an operation during which peers were lost, and find out which ones."""
        limit = time.monotonic() + _NAMING_SEC
        while not self._closed and not self.links.died and time.monotonic() < limit:
            self.links.drive(0.01)
            if self.links.left and not self.process.failure:
                break
        where = f"{what} on rank {self.rank} ({self.description})"
        # Those that left may have done so because another one died.
        culprits = self.links.died or self.links.left
        verb = "died" if self.links.died else "closed its communicators"
        who = f"rank {format_ranks(sorted(culprits))} of the world {verb}" if culprits else ""
        why = f"Horovod: {self.process.failure}" if self.process.failure else ""
        ranks = tuple(rank for rank, member in enumerate(self.members) if member in culprits)
        return PeerLostError(f"{where}: {'. '.join(filter(None, (who, why)))}", ranks=ranks)

    def stalled_error(self, what: str, missing: Sequence[int], limit: timedelta) -> StalledError:
        """Return the error for a wait that took too long, and abort."""
        ranks = f"rank{'s' if len(missing) > 1 else ''} {format_ranks(missing)}" if missing else "some of the ranks"
        text = f"{what}: {ranks} did not come within {limit.total_seconds():g} s"
        self.abort(text)
        return StalledError(
            f"{text} (on rank {self.rank}, {self.description}). They are alive, but do something else: look where "
            "they are.",
            ranks=missing,
        )

    def check_issue(self, what: str) -> None:
        """Raise unless an operation can be given to Horovod now; receives the notices of peers first."""
        if self._closed:
            raise UsageError(f"{what}: this communicator is closed ({self.description})")
        self.links.drive()
        self.check_alive(what)
