"""The interface of a control server's service, which decides and does no I/O.

A service is given each message and returns the actions to take. So all decisions of a coordinator can be tested without
a socket, a thread or a clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from unidist.control.codec import Message


@dataclass(frozen=True)
class Send:
    """Send a message to a peer; ignored if the peer is gone."""

    peer: int
    message: Message


@dataclass(frozen=True)
class Drop:
    """Close the connection to a peer, after all messages to it were sent; `Service.lost` is not called for it."""

    peer: int
    reason: str


@dataclass(frozen=True)
class Publish:
    """Pass an event, any object, to the owner of the server."""

    event: object


Action = Send | Drop | Publish


class Service(ABC):
    """Decides; called by the server's thread only. Peers are numbers that are never used twice.

    Times are seconds of `time.monotonic`.
    """

    @abstractmethod
    def received(self, peer: int, message: Message, now: float) -> Iterable[Action]:
        """A peer that proved the secret sent a message. Anything that is raised drops the peer, and is logged."""

    @abstractmethod
    def lost(self, peer: int, reason: str, now: float) -> Iterable[Action]:
        """A peer that had sent a message closed the connection, or cannot be reached."""

    def stood_still(self, seconds: float, now: float) -> None:  # noqa: B027 - most services measure no silence
        """The server itself did nothing for so long, which ends now: what was not heard meanwhile proves nothing.

        Called before `received` and `tick` have their turn again.
        """

    @abstractmethod
    def tick(self, now: float) -> Iterable[Action]:
        """Time has passed; called several times a second."""
