"""Which hosts of an elastic job reach each other, as their agents tell, and which to leave out if some do not. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

SETTLE_PER_HEARTBEAT = 0.5
"""So long after the first report of a broken link others are still heard: one of its hosts may be lost altogether."""


@dataclass(frozen=True)
class LeaveOut:
    """The decision to go on without a host.

    Args:
        index: of its agent.
        unreached: agents that it does not reach, or that do not reach it.
        silent_sec: for how long nothing was heard over the link.
    """

    index: int
    unreached: tuple[int, ...]
    silent_sec: float


class HostLinks:
    """The links between the agents that are there, by their indices.

    Args:
        heartbeat_sec: of the job.
    """

    def __init__(self, heartbeat_sec: float) -> None:
        self._settle_sec = SETTLE_PER_HEARTBEAT * heartbeat_sec
        self._ports: dict[int, int] = {}
        self._reached: dict[tuple[int, int], bool] = {}
        self._silent_sec = 0.0
        self._broken_since: float | None = None

    def listens(self, index: int, port: int) -> None:
        """An agent listens at this port; 0: it cannot, and nothing is known of its links."""
        self._ports[index] = port

    def port(self, index: int) -> int:
        """Return where an agent listens; 0 if it does not."""
        return self._ports.get(index, 0)

    def lost(self, index: int) -> None:
        """An agent is not there any more."""
        self._ports.pop(index, None)
        self._reached = {link: reached for link, reached in self._reached.items() if index not in link}

    def told(self, index: int, peer: int, *, reached: bool, silent_sec: float, now: float) -> None:
        """An agent tells whether it reaches another one."""
        if index in self._ports and peer in self._ports:
            self._reached[index, peer] = reached
            if not reached:
                self._silent_sec = silent_sec
                self._broken_since = now if self._broken_since is None else self._broken_since

    def is_proven(self, index: int, others: Collection[int]) -> bool:
        """Return whether an agent and each of the others are known to reach each other."""
        if not set(others) - {index}:
            return True
        if index not in self._ports:
            return False
        return all(
            self._reached.get((index, other), False) and self._reached.get((other, index), False)
            for other in others
            if other != index and self.port(index) and self.port(other)
        )

    def leave_out(self, order: Sequence[int], num_ranks: Mapping[int, int], now: float) -> LeaveOut | None:
        """Return the host to leave out now; None if all reach each other, or more is to be heard first.

        Args:
            order: the agents that are there, in the order of the job's hosts.
            num_ranks: ranks of each that are in the world, or on their way there.
            now: the time.
        """
        broken = {link for link, reached in self._reached.items() if not reached}
        if not broken:
            self._broken_since = None
        if self._broken_since is None or now - self._broken_since < self._settle_sec:
            return None
        peers = {index: {b if a == index else a for a, b in broken if index in (a, b)} for index in order}
        # One without ranks first, then the one with the most broken links, then the last.
        index = max(
            (each for each in order if peers[each]),
            key=lambda each: (not num_ranks.get(each), len(peers[each]), order.index(each)),
            default=None,
        )
        return None if index is None else LeaveOut(index, tuple(sorted(peers[index])), self._silent_sec)


__all__ = ["HostLinks"]
