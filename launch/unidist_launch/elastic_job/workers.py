"""The processes of an elastic job, as the launcher knows them, and the labels under which their output is shown."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from unidist_launch.output.lines import Stream


@dataclass(eq=False)
class StartedWorker:
    """A process that was started.

    Args:
        number: of the worker.
        seat: label of its output; free again when it has ended.
        host: index of the agent that has it.
        pid: its process, when the agent has told.
        is_ready: it waits to come into a world, or has been in one.
        started: when it was started, or taken over from another launcher.
        joined: when it first came into a world.
        num_commits: how many it has made, as far as it has told.
        is_leaving: it was asked to go, or has said that it goes.
        has_left: it was let go.
        is_hung: the others go on without it, and it is killed.
        kill_at: when it is to be killed, because it hangs, or was asked to end and has not.
        last_bytes: the last byte that it wrote, by stream.
    """

    number: int
    seat: int
    host: int
    pid: int = 0
    is_ready: bool = False
    started: float = field(default_factory=time.monotonic)
    joined: float | None = None
    num_commits: int = 0
    is_leaving: bool = False
    has_left: bool = False
    is_hung: bool = False
    kill_at: float | None = None
    last_bytes: dict[Stream, bytes] = field(default_factory=dict)


class StartedWorkers:
    """Those that run. Numbers are never used twice, seats are."""

    def __init__(self) -> None:
        self._by_number: dict[int, StartedWorker] = {}
        self._by_host: dict[int, dict[int, StartedWorker]] = {}
        self._by_seat: dict[int, dict[int, StartedWorker]] = {}
        self._free_seats: list[int] = []  # a heap; those below `_num_seats`
        self._num_seats = 0
        self._count = 0

    def __iter__(self) -> Iterator[StartedWorker]:
        return iter(list(self._by_number.values()))

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, host: int) -> StartedWorker:
        """Return a new one, with the lowest seat that is free."""
        if not self._free_seats:
            self._make_seats(self._num_seats + 1)
        worker = StartedWorker(self._count, self._free_seats[0], host)
        self._enter(worker)
        self._count += 1
        return worker

    @property
    def count(self) -> int:
        """How many there have been; the number of the next one."""
        return self._count

    def take_over(self, workers: Iterable[StartedWorker], count: int) -> None:
        """Add workers that another launcher has started; numbers below `count` are not used again."""
        for worker in workers:
            self._enter(worker)
        self._count = max([self._count, count, *(number + 1 for number in self._by_number)])

    def get(self, number: int) -> StartedWorker | None:
        """Return one by its number; None if it has ended."""
        return self._by_number.get(number)

    def remove(self, number: int) -> StartedWorker | None:
        """Forget one that has ended, and return it."""
        worker = self._by_number.pop(number, None)
        if worker is not None:
            del self._by_host[worker.host][number]
            del self._by_seat[worker.seat][number]
            if not self._by_seat[worker.seat]:
                heapq.heappush(self._free_seats, worker.seat)
        return worker

    def of_host(self, index: int) -> list[StartedWorker]:
        """Return those that an agent has."""
        return list(self._by_host.get(index, {}).values())

    def wrote(self, seat: int, stream: Stream, data: bytes) -> None:
        """Note how the output of a seat ends."""
        for worker in self._by_seat.get(seat, {}).values():
            worker.last_bytes[stream] = data[-1:]

    def _enter(self, worker: StartedWorker) -> None:
        self._make_seats(worker.seat + 1)
        if worker.seat in self._free_seats:
            self._free_seats.remove(worker.seat)
            heapq.heapify(self._free_seats)
        self._by_number[worker.number] = worker
        self._by_host.setdefault(worker.host, {})[worker.number] = worker
        self._by_seat.setdefault(worker.seat, {})[worker.number] = worker

    def _make_seats(self, number: int) -> None:
        for seat in range(self._num_seats, number):
            heapq.heappush(self._free_seats, seat)
        self._num_seats = max(self._num_seats, number)
