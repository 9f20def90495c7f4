"""Reads a stream, of which each data worker reads a part."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

from unidist.errors import PeerLostError, UsageError
from unidist.negotiation import allgather_object
from unidist.runtime import context
from unidist_data_service.client.links import DataWorkerLink, DataWorkers, MakeArray, Reply
from unidist_data_service.shards import DataShard
from unidist_data_service.transport.messages import AskSpec, Define, EndOfPart, LeaveEpoch, ReadStream

_TAILS = ("pad", "drop")


class StreamBatches:
    """Batches of a stream. Each iteration is an epoch, of which each batch goes to one rank, and to all equally many.

    The ranks ask the workers in turn, all in the same order: one batch of each rank is a *round* of a worker. A worker
    whose part has ended is not asked any more. Made on all ranks.

    Args:
        workers: of the job.
        sealed: the source, sealed; see `unidist_data_service.worker.StreamSource`.
        make: makes arrays.
        ahead: number of batches that each worker is asked for at a time.
        tail: what happens to batches at the end of a worker's part that do not make a round.

    Raises:
        UsageError: an unknown tail, or `ahead` is below 1.
    """

    def __init__(
        self, workers: DataWorkers, sealed: bytes, make: MakeArray, *, ahead: int, tail: Literal["pad", "drop"]
    ) -> None:
        if ahead < 1:
            raise UsageError(f"data_service(ahead={ahead}): give the number of batches that are read ahead, at least 1")
        if tail not in _TAILS:
            raise UsageError(f"data_service(tail={tail!r}): give one of {', '.join(map(repr, _TAILS))}")
        runtime = context.current()
        self.workers = workers
        self.make = make
        self.ahead = ahead
        self.rank = runtime.topology.rank
        self.name = workers.next_name()
        self.chosen: list[int] = runtime.broadcast_object(workers.present(), name=f"data service: {self.name}")
        missing = [number for number in self.chosen if number not in workers.links]
        if missing:
            raise PeerLostError(f"rank {self.rank} cannot reach data worker(s) {missing}, which rank 0 reads from")
        data_rank, size = runtime.data_place()
        places = dict(enumerate(allgather_object(runtime.negotiator, data_rank, name=f"data ranks: {self.name}")))
        for number in self.chosen:
            workers.links[number].send(Define(self.name, size, tail, places), sealed)
        self._epoch = 0

    def spec(self) -> Any:
        """Return the types and shapes of a batch, as the source tells them."""
        link, ticket = self.workers.links[self.chosen[0]], self.workers.next_ticket()
        link.ask(ticket, AskSpec(self.name, DataShard(0, len(self.chosen))))
        return self.answer(link, ticket, "the types of the batches").spec()

    def answer(self, link: DataWorkerLink, ticket: int, what: str) -> Reply:
        """Return a worker's answer.

        Raises:
            PeerLostError: the worker is gone.
            StalledError: it does not come.
        """
        self.workers.wait(
            functools.partial(_has_changed, link, ticket), functools.partial("{} from {}".format, what, link.name)
        )
        with self.workers.changed:
            reply = link.replies.pop(ticket, None)
        if reply is None:
            raise PeerLostError(
                f"rank {self.rank}: {link.name} is gone ({link.lost}), and with it its part of a stream: {what}. No "
                "other worker can go on with it. Batches of a DataLoader of ud.shard() are made by other workers then"
            )
        return reply

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return _Epoch(self, epoch).batches()


class _Epoch:
    """One iteration."""

    def __init__(self, owner: StreamBatches, epoch: int) -> None:
        self._owner = owner
        self._workers = owner.workers
        self._epoch = epoch
        self._asked: dict[int, deque[tuple[int, int]]] = {number: deque() for number in owner.chosen}
        self._next_round = dict.fromkeys(owner.chosen, 0)

    def batches(self) -> Iterator[Any]:
        """Yield this rank's batches."""
        turn = list(self._owner.chosen)
        try:
            for worker in turn:
                self._ask(worker)
            while turn:
                for worker in list(turn):
                    reply = self._wait(worker)
                    if isinstance(reply.message, EndOfPart):
                        turn.remove(worker)
                        continue
                    self._ask(worker)
                    batch = reply.batch(self._owner.make)
                    del reply
                    yield batch
                    del batch
        finally:
            self._leave()

    def _ask(self, worker: int) -> None:
        while len(self._asked[worker]) < self._owner.ahead:
            number, ticket = self._next_round[worker], self._workers.next_ticket()
            self._next_round[worker] += 1
            self._asked[worker].append((number, ticket))
            shard = DataShard(self._owner.chosen.index(worker), len(self._owner.chosen))
            request = ReadStream(self._owner.name, self._epoch, self._owner.rank, shard, number)
            self._workers.links[worker].ask(ticket, request)

    def _wait(self, worker: int) -> Reply:
        number, ticket = self._asked[worker].popleft()
        return self._owner.answer(self._workers.links[worker], ticket, f"batch {number} of epoch {self._epoch}")

    def _leave(self) -> None:
        for worker, asked in self._asked.items():
            link = self._workers.links[worker]
            link.forget([ticket for _, ticket in asked])
            link.send(LeaveEpoch(self._owner.name, self._epoch, self._owner.rank))


def _has_changed(link: DataWorkerLink, ticket: int) -> bool:
    return bool(link.lost) or ticket in link.replies
