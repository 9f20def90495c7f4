"""The connections of a rank to the data workers of its job."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

from unidist.control import Channel, ChannelLost, KeyValues, WireError, job_values, unexpected
from unidist.errors import ConfigurationError, PeerLostError, StalledError
from unidist.runtime import Context
from unidist.settings import job_secret
from unidist_data_service.errors import DataWorkerError
from unidist_data_service.keys import COUNT_KEY, lost_key, worker_key
from unidist_data_service.transport import ArrayInfo, MappedRegions, can_map, layout, own_buffer, unflatten
from unidist_data_service.transport.messages import (
    Batch,
    DataWorkerHere,
    MakingFailed,
    RankHere,
    Request,
    Spec,
    WorkerAnswer,
)

_log = logging.getLogger("unidist.data")

A = TypeVar("A", bound=WorkerAnswer)

_COUNT_SEC = 15.0
_CONNECT_SEC = 20.0
_SEND_SEC = 60.0
_LOOK_SEC = 0.05

MakeArray = Callable[[ArrayInfo, Any, int], Any]
"""Makes an array of a framework over a buffer, at an offset in bytes: `make(info, buffer, offset)`."""


@dataclass(frozen=True)
class Reply:
    """The answer of a worker.

    Args:
        message: its message.
        buffer: memory with the arrays.
        worker: who has answered, for errors.
    """

    message: WorkerAnswer
    buffer: Any
    worker: str

    def batch(self, make: MakeArray) -> Any:
        """Return the batch.

        Raises:
            DataWorkerError: the worker could not make it.
        """
        message = self._checked(Batch)
        offsets, _ = layout(message.arrays)
        arrays = [make(info, self.buffer, offset) for info, offset in zip(message.arrays, offsets, strict=True)]
        return unflatten(message.tree, arrays)

    def spec(self) -> Any:
        """Return the types of a batch. Raises as `batch`."""
        return self._checked(Spec).spec

    def _checked(self, kind: type[A]) -> A:
        message = self.message
        if isinstance(message, MakingFailed):
            kind_of_error = message.kind or "an error"
            raise DataWorkerError(f"the dataset has raised {kind_of_error} in {self.worker}:\n{message.text}")
        if not isinstance(message, kind):
            raise unexpected(message)
        return message


class DataWorkerLink:
    """The connection to one data worker. A dedicated thread receives.

    Args:
        number: of the worker.
        address: of the worker.
        secret: of the job.
        changed: is notified when something was received, or the worker is lost.

    Attributes:
        lost: why the worker is gone; empty while it is there.
        replies: that were received and not taken, by ticket.
        uses_memory: batches come by memory that both map.

    Raises:
        ChannelLost: it cannot be reached.
    """

    def __init__(self, number: int, address: tuple[str, int], secret: bytes, changed: threading.Condition) -> None:
        self.number = number
        self.lost = ""
        self.replies: dict[int, Reply] = {}
        self._changed = changed
        self._awaited: set[int] = set()
        self._regions = MappedRegions()
        self._channel = Channel.connect(address, secret, timeout_sec=_CONNECT_SEC)
        try:
            worker = self._channel.receive()
            if not isinstance(worker, DataWorkerHere):
                raise ChannelLost(str(unexpected(worker)))
            self.name = f"{worker.name} (process {worker.pid} at {self._channel.peer})"
            self.uses_memory = can_map(worker.path, worker.token)
            self.send(RankHere(maps=self.uses_memory))
        except BaseException:
            self._channel.close()
            raise
        self._thread = threading.Thread(target=self._receive, name=f"unidist-data-{number}", daemon=True)
        self._thread.start()

    def ask(self, ticket: int, message: Request) -> None:
        """Send a request. Its answer will be in `replies`, unless the worker is lost."""
        with self._changed:
            self._awaited.add(ticket)
        self.send(replace(message, ticket=ticket))

    def send(self, message: Request, payload: bytes = b"") -> None:
        """Send a message that has no answer. A worker that does not take it is lost."""
        message = replace(message, freed=tuple(self._regions.take_freed()), num_bytes=len(payload))
        try:
            self._channel.send(message, [payload] if payload else [], timeout_sec=_SEND_SEC)
        except ChannelLost as exc:
            self._end(str(exc))

    def forget(self, tickets: Sequence[int]) -> None:
        """Drop these answers, also those that have yet to come."""
        with self._changed:
            for ticket in tickets:
                self._awaited.discard(ticket)
                self.replies.pop(ticket, None)

    def close(self) -> None:
        """End the connection, and its thread."""
        self._channel.close()
        self._thread.join()

    def _receive(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                if not isinstance(message, WorkerAnswer):
                    raise unexpected(message)
                reply = Reply(message, self._buffer(message), self.name)
                with self._changed:
                    if message.ticket in self._awaited:
                        self._awaited.discard(message.ticket)
                        self.replies[message.ticket] = reply
                        self._changed.notify_all()
                del reply
        except (ChannelLost, WireError, OSError) as exc:
            self._end(str(exc))

    def _buffer(self, message: WorkerAnswer) -> Any:
        if not isinstance(message, Batch):
            return own_buffer(0)
        _, size = layout(message.arrays)
        if message.region is not None:
            return self._regions.view(*message.region, size)
        buffer = own_buffer(size)
        self._channel.receive_into(memoryview(buffer).cast("B"))
        return buffer

    def _end(self, reason: str) -> None:
        self._channel.close()
        with self._changed:
            self.lost = self.lost or reason
            self._changed.notify_all()


class DataWorkers:
    """The data workers of a job, as one rank sees them: `runtime.owned(DataWorkers)`.

    Args:
        runtime: of this process.

    Raises:
        ConfigurationError: the job has no data workers.
        PeerLostError, StalledError: those that it has cannot be reached.
    """

    def __init__(self, runtime: Context) -> None:
        self._rank = runtime.topology.rank
        self._limit = min(runtime.settings.timeout, timedelta(minutes=10)).total_seconds()
        self._start_limit = runtime.settings.start_timeout.total_seconds()
        self._names = itertools.count()
        self._tickets = itertools.count()
        self._lost_told: set[int] = set()
        self.changed = threading.Condition()
        self.links: dict[int, DataWorkerLink] = {}
        self._values = self._find_values()
        try:
            self._count = self._find_count()
            self._connect(range(self._count))
            self.look_for_more()
        except BaseException:
            self.close()
            raise

    def next_name(self) -> str:
        """Return the name of another dataset, the same on every rank."""
        return f"dataset {next(self._names)}"

    def next_ticket(self) -> int:
        """Return the number of another request."""
        return next(self._tickets)

    def present(self) -> list[int]:
        """Return the workers that are there. Says once of each other one that it is gone.

        Raises:
            PeerLostError: there is none any more.
        """
        found = [number for number, link in self.links.items() if not link.lost]
        if not found:
            raise PeerLostError(f"rank {self._rank}: no data worker is left: {self.describe_lost()}")
        for number in sorted(self.links.keys() - set(found) - self._lost_told):
            self._lost_told.add(number)
            link = self.links[number]
            _log.warning("rank %d: %s is gone (%s); the others make its batches", self._rank, link.name, link.lost)
        return found

    def describe_lost(self) -> str:
        """Return what became of the workers that are gone."""
        return "; ".join(f"{link.name} is gone: {link.lost}" for link in self.links.values() if link.lost)

    def look_for_more(self) -> None:
        """Connect to workers that have joined the job since."""
        number = max(self.links, default=self._count - 1) + 1
        while self._values.present([worker_key(number)]):
            self._connect([number])
            number += 1

    def wait(self, is_done: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        """Wait until something has changed so that `is_done` returns True.

        Args:
            is_done: called while `changed` is held, often.
            waits_for: says who is waited for, and for what.

        Raises:
            StalledError: it takes too long.
        """
        deadline = time.monotonic() + self._limit
        with self.changed:
            while not is_done():
                if not self.changed.wait(min(1.0, max(0.0, deadline - time.monotonic()))) and (
                    time.monotonic() > deadline
                ):
                    raise StalledError(f"rank {self._rank} has waited {self._limit:g} s for {waits_for()}")

    def close(self) -> None:
        """Close all connections."""
        for link in self.links.values():
            link.close()
        self.links.clear()
        self._values.close()

    def _find_values(self) -> KeyValues:
        try:
            return job_values()
        except ConfigurationError as exc:
            raise _no_workers(self._rank) from exc

    def _find_count(self) -> int:
        deadline = time.monotonic() + _COUNT_SEC
        while True:
            (told,) = self._values.get([COUNT_KEY])
            if told is not None:
                return int(told)
            if time.monotonic() > deadline:
                raise _no_workers(self._rank)
            time.sleep(_LOOK_SEC)

    def _connect(self, numbers: Sequence[int]) -> None:
        """Connect to these workers, all of which have a minute or two to start."""
        deadline = time.monotonic() + self._start_limit
        waiting, ended = set(numbers), {}
        while waiting:
            for number in sorted(waiting):
                address, reason = self._values.get([worker_key(number), lost_key(number)])
                if reason is not None:
                    ended[number] = reason.decode()
                    waiting.discard(number)
                elif address is not None:
                    host, port = json.loads(address)
                    waiting.discard(number)
                    try:
                        self.links[number] = DataWorkerLink(number, (host, port), job_secret(), self.changed)
                    except ChannelLost as exc:
                        ended[number] = str(exc)
            if waiting and time.monotonic() > deadline:
                names = ", ".join(map(str, sorted(waiting)))
                raise StalledError(
                    f"rank {self._rank} has waited {self._start_limit:g} s for data worker(s) {names} to start"
                )
            if waiting:
                time.sleep(_LOOK_SEC)
        for number, told in ended.items():
            _log.warning("rank %d: data worker %d cannot be used: %s", self._rank, number, told)
        if not self.links:
            reasons = "; ".join(f"data worker {number}: {told}" for number, told in ended.items())
            raise PeerLostError(f"rank {self._rank}: no data worker can be used: {reasons}")


def _no_workers(rank: int) -> ConfigurationError:
    return ConfigurationError(
        f"rank {rank}: ud.data_service() needs data workers, and this job has none: `unidist launch --data-workers 2 "
        "... python train.py`. To read data in the ranks themselves, use ud.shard()"
    )
