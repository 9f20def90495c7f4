"""Deals the batches of a stream out to ranks: each one to one rank, and to all ranks equally many. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Tail = Literal["pad", "drop"]


@dataclass
class _Round:
    batches: list[Any]
    waits_for: set[int] = field(default_factory=set)


class Dealer:
    """Deals the batches of one epoch of one part of a stream.

    Round j of a part consists of as many batches as there are data ranks, in the stream's order; batch i of it goes to
    data rank i. Ranks that hold parts of one model have the same data rank, and get the same batch. So ranks that ask
    for the same rounds get the same number of batches, and no batch goes to two data ranks.

    Args:
        batches: of the epoch.
        size: number of data ranks.
        readers: the ranks that read, each with its data rank.
        tail: what happens to batches that do not make a whole round: "pad" adds the first ones of the epoch again,
            "drop" leaves them out.
        ahead: number of rounds that wait for the slowest rank at most.
    """

    def __init__(self, batches: Iterator[Any], *, size: int, readers: dict[int, int], tail: Tail, ahead: int) -> None:
        self._batches = batches
        self._size = size
        self._readers = readers
        self._tail = tail
        self._ahead = ahead
        self._rounds: dict[int, _Round] = {}
        self._made = 0
        self._first: list[Any] = []
        self._ended = False
        self._failure: Exception | None = None
        self._left: set[int] = set()

    @property
    def is_done(self) -> bool:
        """Return whether nobody will ask for more."""
        return self._left == set(self._readers)

    def may_take(self, number: int) -> bool:
        """Return whether `take` of this round returns without more than `ahead` rounds waiting for others."""
        return self._ended or number < self._made or not self._rounds or self._made - min(self._rounds) < self._ahead

    def waits_for(self) -> list[int]:
        """Return the ranks that have yet to take their batch of the oldest round."""
        return sorted(self._rounds[min(self._rounds)].waits_for) if self._rounds else []

    def take(self, reader: int, number: int) -> tuple[Any] | None:
        """Return a rank's batch of a round, in a tuple; None: the epoch ends before this round.

        Args:
            reader: the rank.
            number: of the round; each rank takes each round once, in order.

        Raises:
            Exception: what making a batch has raised, on each rank that asks for that round.
        """
        while self._made <= number and not self._ended:
            try:
                self._make()
            except Exception as exc:
                self._failure, self._ended = exc, True
        found = self._rounds.get(number)
        if found is None and self._failure is not None:
            raise self._failure
        if found is None:
            self.leave(reader)
            return None
        batch = found.batches[self._readers[reader]]
        found.waits_for.discard(reader)
        self._tidy()
        return (batch,)

    def leave(self, reader: int) -> None:
        """A rank takes nothing more of this epoch."""
        self._left.add(reader)
        for each in self._rounds.values():
            each.waits_for.discard(reader)
        self._tidy()

    def _make(self) -> None:
        batches = []
        for batch in self._batches:
            batches.append(batch)
            if len(self._first) < self._size:
                self._first.append(batch)
            if len(batches) == self._size:
                break
        else:
            self._ended = True
            if not batches or self._tail == "drop":
                return
            missing = self._size - len(batches)
            batches += [self._first[number % len(self._first)] for number in range(missing)]
        self._rounds[self._made] = _Round(batches, set(self._readers) - self._left)
        self._made += 1

    def _tidy(self) -> None:
        for number in [number for number, each in self._rounds.items() if not each.waits_for]:
            del self._rounds[number]
