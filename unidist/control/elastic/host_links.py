"""Which hosts of a job reach each other, as their agents tell, and which to leave out if some do not. Pure.

Each of up to `NUM_WATCHED` + 1 hosts watches all others. Of more, each watches `NUM_WATCHED` others, at distances of
powers of two in the order of their agents. So the links of a host do not grow with the job, and several others see when
it is cut off. Two hosts that do not watch each other and do not reach each other are only noticed by their ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

NUM_WATCHED = 8
"""So many others a host watches at most."""

_DISTANCES = tuple(2**power for power in range(NUM_WATCHED // 2))

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
        self._peers: dict[int, tuple[int, ...]] | None = None  # None: to be worked out
        self._reached: dict[tuple[int, int], bool] = {}
        self._broken: set[tuple[int, int]] = set()
        self._silent_sec = 0.0
        self._broken_since: float | None = None

    def listens(self, index: int, port: int) -> None:
        """An agent listens at this port; 0: it cannot, and nothing is known of its links."""
        self._ports[index] = port
        self._peers = None

    def is_gathering(self, started: Collection[int]) -> bool:
        """Return whether some of these agents have yet to say where they listen, and will change who watches whom.

        In a job so small that all hosts watch all others, a newcomer changes nothing for those that are there.
        """
        return len(started) > NUM_WATCHED + 1 and not all(index in self._ports for index in started)

    def port(self, index: int) -> int:
        """Return where an agent listens; 0 if it does not."""
        return self._ports.get(index, 0)

    def lost(self, index: int) -> None:
        """An agent is not there any more."""
        if self._ports.pop(index, None) is not None:
            self._peers = None
        self._prune()

    def peers(self, index: int) -> tuple[int, ...]:
        """Return the agents that an agent is to watch, and is watched by; none if it does not listen."""
        if self._peers is None:
            self._peers = _watched(sorted(each for each, port in self._ports.items() if port))
            self._prune()
        return self._peers.get(index, ())

    @property
    def has_broken(self) -> bool:
        """There are links of which an agent tells that the other end is not reached."""
        return bool(self._broken)

    def told(self, index: int, peer: int, *, reached: bool, silent_sec: float, now: float) -> None:
        """An agent tells whether it reaches another one."""
        if peer in self.peers(index):
            self._reached[index, peer] = reached
            if not reached:
                self._broken.add((index, peer))
                self._silent_sec = silent_sec
                self._broken_since = now if self._broken_since is None else self._broken_since
            else:
                self._broken.discard((index, peer))
                self._note_whole()

    def is_proven(self, index: int, others: Collection[int]) -> bool:
        """Return whether an agent and all that it watches of these others are known to reach each other."""
        if not any(other != index for other in others):
            return True
        if index not in self._ports:
            return False
        return all(
            self._reached.get((index, other), False) and self._reached.get((other, index), False)
            for other in self.peers(index)
            if other in others
        )

    def leave_out(self, order: Sequence[int], num_ranks: Mapping[int, int], now: float) -> LeaveOut | None:
        """Return the host to leave out now; None if all reach each other, or more is to be heard first.

        Args:
            order: the agents that are there, in the order of the job's hosts.
            num_ranks: ranks of each that are in the world, or on their way there.
            now: the time.
        """
        broken = self._broken
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

    def _prune(self) -> None:
        """Forget what was told of links that nobody watches any more."""
        self._reached = {
            link: reached
            for link, reached in self._reached.items()
            if link[0] in self._ports and link[1] in self._ports
        }
        if self._peers is not None:
            self._reached = {
                link: told for link, told in self._reached.items() if link[1] in self._peers.get(link[0], ())
            }
        self._broken = {link for link, reached in self._reached.items() if not reached}
        self._note_whole()

    def _note_whole(self) -> None:
        if not self._broken:
            self._broken_since = None


def _watched(order: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return whom each agent watches; if one watches another, that one watches it."""
    size = len(order)
    if size <= NUM_WATCHED + 1:
        return {index: tuple(each for each in order if each != index) for index in order}
    offsets = [sign * distance for distance in _DISTANCES for sign in (1, -1)]
    return {
        index: tuple(sorted({order[(place + offset) % size] for offset in offsets} - {index}))
        for place, index in enumerate(order)
    }


__all__ = ["HostLinks"]
