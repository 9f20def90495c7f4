"""Which data worker makes which batch, and which batches are under way. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class BatchWindow:
    """Batches of one epoch that are asked for and have not come yet.

    Each batch is asked of one worker: of the one with the fewest batches under way. When a worker is lost, the others
    are asked for its batches, so each batch comes once.

    Args:
        workers: that make batches.
        ahead: number of batches that each is asked for at a time.
    """

    def __init__(self, workers: Iterable[int], ahead: int) -> None:
        self._ahead = ahead
        self._under_way: dict[int, set[int]] = {worker: set() for worker in workers}
        self._again: list[int] = []
        self._next = 0

    @property
    def workers(self) -> list[int]:
        """The workers that are left."""
        return list(self._under_way)

    def choose(self) -> tuple[int, int] | None:
        """Return the next batch to ask for, and the worker to ask; None while all have enough to do.

        Batches of a lost worker come first, and at once: they are those that the rank waits for.
        """
        load, worker = min((len(batches), worker) for worker, batches in self._under_way.items())
        if self._again:
            batch = self._again.pop(0)
        elif load < self._ahead:
            batch, self._next = self._next, self._next + 1
        else:
            return None
        self._under_way[worker].add(batch)
        return batch, worker

    def came(self, batch: int) -> None:
        """Note that a batch has come."""
        for batches in self._under_way.values():
            batches.discard(batch)

    def worker_of(self, batch: int) -> int:
        """Return the worker that was asked for a batch last."""
        return next(worker for worker, batches in self._under_way.items() if batch in batches)

    def lost(self, worker: int) -> list[int]:
        """Note that a worker is gone, and return its batches, for which others are to be asked. One has to be left."""
        batches = sorted(self._under_way.pop(worker))
        self._again = sorted({*self._again, *batches})
        return batches
