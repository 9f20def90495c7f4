"""Clocks of workers: who may continue under BSP, SSP and ASP, and which gradients of a step count. Pure.

A worker's clock is the number of steps that it has finished. Under a bound of S (stale synchronous parallel, SSP: Ho et
al., NIPS 2013) a worker continues once its clock is at most S above that of the slowest worker. A bound of 0 is bulk
synchronous (BSP), no bound is asynchronous (ASP).

Nothing here waits or locks. The numbers are kept in sequences of the caller, which may be memory that processes share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, Protocol


class Numbers(Protocol):
    """A list of integers, or an array of them."""

    def __getitem__(self, index: int, /) -> Any:
        """Return one."""

    def __setitem__(self, index: int, value: int, /) -> None:
        """Set one."""

    def __len__(self) -> int:
        """Return how many there are."""

    def __iter__(self) -> Iterator[Any]:
        """Return all of them."""


class WorkerState(IntEnum):
    """Whether a worker counts."""

    ABSENT = 0
    """It has not joined."""
    ACTIVE = 1
    LEFT = 2
    """It has ended, or was lost."""


class Clocks:
    """The clocks of all workers.

    Args:
        clocks: one number for each worker.
        members: one `WorkerState` for each worker.
    """

    def __init__(self, clocks: Numbers, members: Numbers) -> None:
        self._clocks = clocks
        self._members = members

    @property
    def active(self) -> list[int]:
        """The workers that count."""
        return [worker for worker, member in enumerate(self._members) if member == WorkerState.ACTIVE]

    def join(self, worker: int) -> None:
        """Let a worker count from now on. Its clock begins at that of the slowest, so that nobody has to wait longer.

        Where nobody else counts, it goes on from the largest clock of all.
        """
        others = [self._clocks[other] for other in self.active if other != worker]
        # The clock is set first: a process that ends in between has not joined.
        self._clocks[worker] = min(others) if others else max(self._clocks, default=0)
        self._members[worker] = WorkerState.ACTIVE

    def leave(self, worker: int) -> None:
        """Let a worker not count any more."""
        self._members[worker] = WorkerState.LEFT

    def finish_step(self, worker: int) -> int:
        """Advance a worker's clock by one, and return it."""
        self._clocks[worker] += 1
        return int(self._clocks[worker])

    def waits_for(self, worker: int, bound: int | None) -> list[int]:
        """Return the workers for which a worker has to wait before its next step; none: it may continue.

        Args:
            worker: an active one.
            bound: the largest difference between its clock and that of the slowest; None: any.
        """
        if bound is None:
            return []
        least = self._clocks[worker] - bound
        return [other for other in self.active if other != worker and self._clocks[other] < least]


class StepArrivals:
    """Which gradients of a step count: the first `needed` ones (Chen et al. 2016, https://arxiv.org/abs/1604.00981).

    A gradient is labelled with the number of updates that had been made when its worker read the parameters. Gradients
    with another label than the present number come too late. When `needed` workers have arrived the step is closed,
    with those that have arrived by then, and the update is made of their mean.

    Args:
        arrived: for each worker, one above the label of its last gradient.
        counted: for each worker, whether its gradient is in the closed step.
        needed: number of gradients that make an update.
    """

    def __init__(self, arrived: Numbers, counted: Numbers, needed: int) -> None:
        self._arrived = arrived
        self._counted = counted
        self._needed = needed

    def is_late(self, worker: int, label: int, version: int, *, is_closed: bool) -> bool:
        """Return whether a gradient that is about to arrive does not count: its step is closed, or has it already."""
        return label != version or is_closed or self._arrived[worker] == label + 1

    def arrive(self, worker: int, label: int) -> None:
        """Note the gradient of a worker, which is in place."""
        self._arrived[worker] = label + 1

    def missing(self, label: int) -> list[int]:
        """Return the workers whose gradients for a step have not arrived."""
        return [worker for worker, last in enumerate(self._arrived) if last != label + 1]

    def try_to_close(self, label: int) -> bool:
        """Choose the gradients of a step if enough have arrived. May be repeated until the caller has noted it."""
        missing = self.missing(label)
        if len(self._arrived) - len(missing) < self._needed:
            return False
        for worker in range(len(self._arrived)):
            self._counted[worker] = worker not in missing
        return True

    def members(self) -> list[int]:
        """Return the workers whose gradients are in the closed step, in their order."""
        return [worker for worker, is_in in enumerate(self._counted) if is_in]


def waits_for_step(calls: int, version: int) -> bool:
    """Return whether a worker waits until the step of its gradient is applied, with backup workers.

    A worker whose gradients were dropped has called for more steps than it has seen made, and is given those back: it
    does not wait while it has made at most as many calls as there were updates. Without that, ranks that make the same
    number of calls would not come to their ends together.

    Args:
        calls: steps that the worker has asked for, this one included.
        version: updates that have been made.
    """
    return calls > version


def listed(workers: Sequence[int]) -> str:
    """Return workers for a message: "worker 1", "workers 0, 2"."""
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
