"""The ranks of one `init()` meet: they give small payloads and get those of all. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from unidist.communicator import format_ranks
from unidist.control.codec import MAX_FRAME_BYTES
from unidist.control.messages import Failed, Gathered
from unidist.control.service import Action, Send

MAX_PAYLOAD_BYTES = 128 << 10


class Meeting:
    """One all-gather after another among `world_size` ranks.

    The answer has each payload with the number of ranks in a row that gave it: what is equal everywhere, as the name of
    an engine, costs each rank the same however many there are.

    The first thing that goes wrong ends the meeting for all: ranks that wait get the message `Failed` at once, others
    when they give. It has the kind of the error, a text and the ranks that are to blame. A rank that only
    trains gets nothing: thousands of messages that nobody reads would delay those that are waited for.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._peers: dict[int, int] = {}
        self._left: set[int] = set()
        self._rounds: dict[int, dict[int, str]] = {}
        self._num_done = 0
        self._failure: Failed | None = None

    @property
    def is_over(self) -> bool:
        """Return whether every rank has entered and left."""
        return len(self._left) == self.world_size

    def has(self, rank: int) -> bool:
        """Return whether a rank has entered."""
        return rank in self._peers

    def join(self, rank: int, peer: int) -> None:
        """A rank that is not here yet has come, by a connection. It is answered when it gives its first payload."""
        self._peers[rank] = peer

    def give(self, rank: int, number: int, payload: str) -> Iterator[Action]:
        """A rank gives its payload, as text, for the round of this number."""
        if self._failure is not None:
            yield Send(self._peers[rank], self._failure)
            return
        payloads = self._rounds.setdefault(number, {})
        payloads[rank] = payload
        if len(payloads) < self.world_size:
            return
        ordered = (payloads[each] for each in range(self.world_size))
        runs = tuple((payload, sum(1 for _ in equal)) for payload, equal in itertools.groupby(ordered))
        if sum(len(payload) for payload, _ in runs) > MAX_FRAME_BYTES // 2:
            yield from self.fail("ConfigurationError", f"{self.world_size} ranks gave more than a message holds", ())
            return
        del self._rounds[number]
        self._num_done = number + 1
        message = Gathered(number, runs)
        for peer in self._peers.values():
            yield Send(peer, message)

    def give_up(self, rank: int, number: int) -> Iterator[Action]:
        """A rank has waited long enough for a round (0: the first, so for all to come)."""
        if self._failure is not None:
            yield Send(self._peers[rank], self._failure)
            return
        if number < self._num_done:
            return  # what it waits for is on its way
        given = self._rounds.get(number, {})
        missing = [each for each in range(self.world_size) if each not in given]
        absent = [each for each in missing if each not in self._peers]
        if absent:
            text = (
                f"init: rank{'s' if len(absent) > 1 else ''} {format_ranks(absent)} of {self.world_size} did not come "
                "in time. Look for an earlier error of theirs; slow starts need a larger UNIDIST_START_TIMEOUT_SEC."
            )
        else:
            text = f"init: rank(s) {format_ranks(missing)} did not answer in time (rank {rank} waited)"
        yield from self.fail("StalledError", text, absent or missing)

    def leave(self, rank: int) -> None:
        """A rank is done; it left on purpose."""
        self._left.add(rank)

    def lose(self, rank: int, reason: str) -> Iterator[Action]:
        """Note that a rank died without having left."""
        if rank not in self._left:
            self._left.add(rank)
            yield from self.fail("PeerLostError", f"rank {rank} died or left during init: {reason}", (rank,))

    def fail(self, kind: str, text: str, ranks: tuple[int, ...] | list[int]) -> Iterator[Action]:
        """End the meeting for all."""
        if self._failure is not None:
            return
        self._failure = Failed(kind, text, tuple(ranks))
        waiting = {rank for payloads in self._rounds.values() for rank in payloads}
        for rank in sorted(waiting - self._left):
            yield Send(self._peers[rank], self._failure)


def refusal(text: str) -> Failed:
    """Return the message that tells a process that it has no place here."""
    return Failed("ConfigurationError", text)
