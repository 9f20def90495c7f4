"""Cuts the output of ranks into lines, and folds equal lines of several ranks. Pure; bytes throughout."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum


class Stream(IntEnum):
    """A rank's output stream; the value is its file descriptor there and here."""

    STDOUT = 1
    STDERR = 2


class LineSplitter:
    """Cuts a stream of bytes at newlines, and keeps the last line until it is complete.

    Args:
        max_bytes: a line longer than this is handed out in pieces.
    """

    def __init__(self, *, max_bytes: int = 8 << 20) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()
        self.partial_since = 0.0
        """When the first byte of the incomplete line came; meaningful while `partial` is not empty."""

    @property
    def partial(self) -> bytes:
        """The line that is not complete yet."""
        return bytes(self._rest)

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Return the lines that `data` completes, without their newlines."""
        if not self._rest:
            self.partial_since = now
        head, newline, tail = data.rpartition(b"\n")
        if not newline:
            self._rest += data
            return self._take() if len(self._rest) > self._max_bytes else []
        lines = (bytes(self._rest) + head).split(b"\n")
        self._rest = bytearray(tail)
        self.partial_since = now
        return lines

    def take_frames(self) -> list[bytes]:
        """Return the part of the incomplete line up to its last carriage return (a progress bar's finished frames)."""
        frames, found, rest = self._rest.rpartition(b"\r")
        if not found or not frames:
            return []
        self._rest = bytearray(rest)
        return [bytes(frames)]

    def finish(self) -> list[bytes]:
        """Return the last line if it ended without a newline."""
        return self._take() if self._rest else []

    def _take(self) -> list[bytes]:
        line = bytes(self._rest)
        self._rest.clear()
        return [line]


@dataclass(frozen=True, slots=True)
class Folded:
    """One line to print, and the ranks that printed it."""

    ranks: tuple[int, ...]
    stream: Stream
    line: bytes


@dataclass(frozen=True, slots=True)
class _Pending:
    order: int
    since: float
    stream: Stream
    line: bytes

    @property
    def key(self) -> tuple[Stream, bytes]:
        return self.stream, self.line


class Folder:
    """Merges the lines of all ranks; one that several ranks print within a short time comes out once.

    A rank's own lines keep their order. A line waits until every rank that may print it has done so, and
    no longer than the window.

    Args:
        num_ranks: number of ranks.
        window: longest wait, in seconds.
        max_pending: with more lines of one rank than this waiting, none waits any longer.
    """

    _LOOKAHEAD = 8

    def __init__(self, num_ranks: int, *, window: float = 0.1, max_pending: int = 512) -> None:
        self._window = window
        self._max_pending = max_pending
        self._queues: list[deque[_Pending]] = [deque() for _ in range(num_ranks)]
        self._open = {stream: set(range(num_ranks)) for stream in Stream}
        self._waiting: set[int] = set()  # ranks that have lines in their queues
        self._pending: Counter[tuple[Stream, bytes]] = Counter()
        self._count = 0

    def make_room(self, num_ranks: int) -> None:
        """Take lines of so many ranks from now on, if that is more."""
        for rank in range(len(self._queues), num_ranks):
            self._queues.append(deque())
            for stream in Stream:
                self._open[stream].add(rank)

    def add(self, rank: int, stream: Stream, lines: Iterable[bytes], now: float) -> None:
        """Take the next lines of a rank."""
        for line in lines:
            self._queues[rank].append(_Pending(self._count, now, stream, line))
            self._waiting.add(rank)
            self._pending[(stream, line)] += 1
            self._count += 1

    def close(self, rank: int, stream: Stream) -> None:
        """Nothing more comes from this stream of this rank: nobody waits for it."""
        self._open[stream].discard(rank)

    def ready(self, now: float, *, flush: bool = False) -> Iterator[Folded]:
        """Yield the lines whose time has come; with `flush`, all."""
        while (first := self._oldest()) is not None:
            rank, head = first
            ranks = self._ranks_at(head)
            if not (
                flush
                or now - head.since >= self._window
                or self._open[head.stream] <= set(ranks)
                or len(self._queues[rank]) > self._max_pending
            ):
                return
            if self._pending[head.key] > len(ranks):  # it also stands further back, behind another line
                head = self._queues[self._better_first(rank)][0]
                ranks = self._ranks_at(head)
            for each in ranks:
                self._queues[each].popleft()
                if not self._queues[each]:
                    self._waiting.discard(each)
            self._pending[head.key] -= len(ranks)
            if not self._pending[head.key]:
                del self._pending[head.key]
            yield Folded(ranks, head.stream, head.line)

    def deadline(self) -> float | None:
        """Return when the oldest waiting line has waited long enough; None when none waits."""
        first = self._oldest()
        return None if first is None else first[1].since + self._window

    def _oldest(self) -> tuple[int, _Pending] | None:
        if not self._waiting:
            return None
        rank = min(self._waiting, key=lambda each: self._queues[each][0].order)
        return rank, self._queues[rank][0]

    def _ranks_at(self, line: _Pending) -> tuple[int, ...]:
        return tuple(sorted(rank for rank in self._waiting if self._queues[rank][0].key == line.key))

    def _better_first(self, rank: int) -> int:
        """Return a rank whose first line stands before a line that `rank` has first: printing it lets those fold."""
        seen = {rank}
        while True:
            head = self._queues[rank][0]
            blocking = next((other for other in sorted(self._waiting) if self._has_later(other, head)), None)
            if blocking is None or blocking in seen:
                return rank
            seen.add(blocking)
            rank = blocking

    def _has_later(self, rank: int, line: _Pending) -> bool:
        queue = self._queues[rank]
        if len(queue) < 2 or queue[0].key == line.key:
            return False
        return any(queue[i].key == line.key for i in range(1, min(len(queue), self._LOOKAHEAD)))


def rank_label(ranks: Iterable[int]) -> str:
    """Return ranks in short form: "0", "0-3", "0,2-3"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
