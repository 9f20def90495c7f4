"""The rendezvous, by which the ranks of a job find each other before any communicator exists.

It has one primitive, `allgather`: every rank contributes a few bytes (and, on one host, open file descriptors) and gets
those of all ranks. Engines exchange addresses and shared memory through it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

__all__ = [
    "Contribution",
    "MeetingPlace",
    "Rendezvous",
    "SingleRendezvous",
]


@dataclass(frozen=True)
class Contribution:
    """The contribution of one rank: `payload`, and `fds`, descriptors that the receiver owns."""

    payload: bytes
    fds: tuple[int, ...] = ()


@dataclass(frozen=True)
class MeetingPlace:
    """The meeting place of the ranks of a job on several hosts.

    Args:
        server: address of the job's control server: host and port.
        host_address: address at which the other hosts reach this one.
        generation: membership of the world that this process belongs to.
    """

    server: tuple[str, int]
    host_address: str
    generation: int = 0


class Rendezvous(ABC):
    """Exchanges small messages among all ranks of a job. Every rank makes the same calls in the same order.

    Attributes:
        address: IP address at which every rank of the job reaches this one; an engine listens there, and nowhere else.
        secret: that the ranks share, for engines that connect hosts in a job whose launcher gave it none; may be empty.
    """

    address: str = "127.0.0.1"
    secret: bytes = b""

    @abstractmethod
    def allgather(self, payload: bytes, *, fds: Sequence[int] = (), timeout: timedelta) -> list[Contribution]:
        """Return the contributions of all ranks, in rank order, including this rank's.

        Args:
            payload: a few kilobytes at most.
            fds: open descriptors to pass to every rank; the caller keeps its own. One host only.
            timeout: longest wait for the other ranks.

        Raises:
            StalledError: a rank did not arrive; names the missing ranks, if known.
            PeerLostError: a rank arrived and died.
        """

    @abstractmethod
    def close(self) -> None:
        """Release sockets. Idempotent."""


class SingleRendezvous(Rendezvous):
    """The trivial rendezvous of a job with one process."""

    def allgather(self, payload: bytes, *, fds: Sequence[int] = (), timeout: timedelta) -> list[Contribution]:
        """Return this rank's own contribution; its descriptors are duplicated."""
        import os

        return [Contribution(payload, tuple(os.dup(fd) for fd in fds))]

    def close(self) -> None:
        """Nothing to give back."""
