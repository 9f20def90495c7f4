"""Reads a dataset whose samples the rank's sampler chooses: any data worker can make any batch."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from unidist.errors import UsageError
from unidist_data_service.client.links import DataWorkerLink, DataWorkers, MakeArray, Reply
from unidist_data_service.client.window import BatchWindow
from unidist_data_service.transport.messages import Define, Fetch


class IndexedBatches:
    """Batches that data workers make of the samples that this rank chooses.

    Each batch is made by one worker. The batches of a worker that is lost are made by the others: all are made once, in
    the same order, and equal to those that the lost worker would have made.

    Args:
        workers: of the job.
        sealed: the source, sealed; see `unidist_data_service.worker.IndexedSource`.
        indices: called in each epoch; returns the samples of each batch.
        make: makes arrays.
        ahead: number of batches that each worker is asked for at a time.
        seed: of what is random in a batch, on this rank.
    """

    def __init__(
        self,
        workers: DataWorkers,
        sealed: bytes,
        indices: Callable[[], Iterable[Any]],
        make: MakeArray,
        *,
        ahead: int,
        seed: int,
    ) -> None:
        if ahead < 1:
            raise UsageError(f"data_service(ahead={ahead}): give the number of batches that are read ahead, at least 1")
        self.workers = workers
        self._sealed = sealed
        self._indices = indices
        self.make = make
        self.ahead = ahead
        self.seed = seed
        self.name = workers.next_name()
        self._knows: set[int] = set()
        self.epoch = 0
        self.first = 0
        """Number of the first batch of the next iteration, for seeds: others are in the middle of an epoch."""

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        self.workers.look_for_more()
        first, self.first = self.first, 0
        return _Epoch(self, epoch, first, iter(self._indices())).batches()

    def define(self, number: int) -> None:
        """Tell a worker the dataset, once."""
        if number not in self._knows:
            self._knows.add(number)
            self.workers.links[number].send(Define(self.name), self._sealed)


class _Epoch:
    """One iteration."""

    def __init__(self, owner: IndexedBatches, epoch: int, first: int, chosen: Iterator[Any]) -> None:
        self._owner = owner
        self._workers = owner.workers
        self._epoch, self._first = epoch, first
        self._chosen = chosen
        self._window = BatchWindow(self._workers.present(), owner.ahead)
        self._asked: dict[int, tuple[int, Any]] = {}  # by batch: its ticket, its samples

    def batches(self) -> Iterator[Any]:
        """Yield the batches in the sampler's order."""
        number = 0
        try:
            while self._ask(number):
                reply = self._wait(number)
                self._ask(number + 1)
                batch = reply.batch(self._owner.make)
                del reply  # so that its memory is given back as soon as the script lets go of the batch
                yield batch
                del batch
                number += 1
        finally:
            tickets = [ticket for ticket, _ in self._asked.values()]
            for link in self._workers.links.values():
                link.forget(tickets)

    def _ask(self, number: int) -> bool:
        """Ask for as many batches as may be under way, and return whether batch `number` is one of them."""
        while (chosen := self._window.choose()) is not None:
            batch, worker = chosen
            if batch not in self._asked:
                try:
                    samples = next(self._chosen)
                except StopIteration:
                    self._window.came(batch)
                    break
                self._asked[batch] = (self._workers.next_ticket(), samples)
            ticket, samples = self._asked[batch]
            self._owner.define(worker)
            seed = zlib.crc32(f"{self._owner.seed} {self._epoch} {self._first + batch}".encode())
            self._workers.links[worker].ask(ticket, Fetch(self._owner.name, samples, seed))
        return number in self._asked

    def _wait(self, number: int) -> Reply:
        """Return the answer for a batch; other workers are asked for the batches of those that are lost."""
        ticket, _ = self._asked[number]
        while True:
            link = self._workers.links[self._window.worker_of(number)]
            self._workers.wait(
                functools.partial(_has_changed, link, ticket),
                functools.partial("batch {} of epoch {} from {}".format, number, self._epoch, link.name),
            )
            with self._workers.changed:
                reply = link.replies.pop(ticket, None)
            if reply is not None:
                self._window.came(number)
                del self._asked[number]
                return reply
            self._take_over()
            self._ask(number)

    def _take_over(self) -> None:
        self._workers.present()  # raises if none is left
        for worker in self._window.workers:
            link = self._workers.links[worker]
            if link.lost:
                link.forget([self._asked[batch][0] for batch in self._window.lost(worker)])


def _has_changed(link: DataWorkerLink, ticket: int) -> bool:
    return bool(link.lost) or ticket in link.replies
