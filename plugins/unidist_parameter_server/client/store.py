"""The store of one worker over servers. Requests to different servers are made at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from typing_extensions import override

from unidist_parameter_server.client.link import SegmentLink
from unidist_parameter_server.store.interface import Contents, Push, Receive, Store
from unidist_parameter_server.store.shards import StoreShard
from unidist_parameter_server.wire import ArrayChannel, told_rules
from unidist_parameter_server.wire.messages import Fetch, Fill, PushTogether, ReadContents, ReadLog
from unidist_parameter_server.wire.messages import Push as PushMessage

Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")

_SILENCE_SEC = 30.0


class RemoteStore(Store):
    """One worker's view of a store whose shards are on servers. Its creation is collective.

    Args:
        shards: all of them.
        slots: names of the optimizer's arrays.
        worker: number of this worker.
        num_workers: of all that there were at the start.
        parts: the shards of each server.
        links: to each server that has shards.
        barrier: returns when all workers have called it.
    """

    def __init__(
        self,
        shards: Sequence[StoreShard],
        slots: Sequence[str],
        worker: int,
        num_workers: int,
        *,
        parts: Sequence[range],
        links: Sequence[SegmentLink],
        barrier: Callable[[], None],
    ) -> None:
        self.shards = tuple(shards)
        self.slots = tuple(slots)
        self.worker = worker
        self.num_workers = num_workers
        self._parts = parts
        self._links = links
        self._barrier = barrier
        self._is_open = True
        self._threads = ThreadPoolExecutor(len(links), "unidist-servers") if len(links) > 1 else None
        largest = [max((shards[index].nbytes for index in part), default=0) for part in parts]
        self._memory = [np.empty(nbytes, np.uint8) for nbytes in largest]
        self._part_of = {index: part for part, indices in enumerate(parts) for index in indices}

    # Contents

    @override
    def fill(self, write: Callable[[StoreShard, Contents], None]) -> None:
        self._barrier()  # everybody has ended the step before

        def fill(part: int) -> None:
            indices = [index for index in self._parts[part] if index % self.num_workers == self.worker]
            arrays: list[Array] = []
            for index in indices:
                shard, dtype = self.shards[index], self.shards[index].dtype.value
                values, *slots = (np.zeros(shard.count, dtype) for _ in range(1 + len(self.slots)))
                counts = np.zeros(len(shard.pieces), np.int64)
                write(shard, Contents(values, slots, counts))
                arrays += [values, *slots, counts]
            self._links[part].request(Fill(self._own(part, indices)), lambda: arrays)

        for part in range(len(self._links)):  # one after the other: `write` is called in this thread
            fill(part)
        self._barrier()

    @override
    def contents(self, index: int, receive: Callable[[Contents], None]) -> None:
        part, shard = self._part_of[index], self.shards[index]
        dtype = shard.dtype.value
        arrays = [np.empty(shard.count, dtype) for _ in range(1 + len(self.slots))]
        arrays.append(np.empty(len(shard.pieces), np.int64))

        def take(channel: ArrayChannel) -> None:
            for array in arrays:
                channel.receive_array(array, timeout_sec=_SILENCE_SEC)

        self._links[part].request(ReadContents(self._own(part, [index])), receive=take)
        receive(Contents(arrays[0], arrays[1:-1], arrays[-1]))

    @override
    def read(self, index: int, receive: Receive) -> int:
        return self.read_all([index], lambda _: receive)[index]

    @override
    def read_all(self, order: Sequence[int], receiver: Callable[[int], Receive]) -> dict[int, int]:
        versions: dict[int, int] = {}

        def read(part: int) -> None:
            indices = [index for index in order if self._part_of[index] == part]
            message = Fetch(self._own(part, indices))
            answer = self._links[part].request(message, receive=self._taker(part, indices, receiver))
            versions.update(zip(indices, answer.versions, strict=True))

        self._each(read)
        return versions

    # Pushes that are applied at once

    @override
    def push(self, index: int, push: Push, receive: Receive | None = None, *, waits: bool = True) -> int | None:
        return self.push_all([index], push, None if receive is None else lambda _: receive)[index]

    @override
    def push_all(
        self, order: Sequence[int], push: Push, receiver: Callable[[int], Receive] | None = None
    ) -> dict[int, int]:
        versions: dict[int, int] = {}
        rules, present = told_rules(push.rules), tuple(push.present)
        changes = self._changes(push, order)

        def push_part(part: int) -> None:
            indices = [index for index in order if self._part_of[index] == part]
            read = push.read_versions
            message = PushMessage(
                indices=self._own(part, indices),
                number=push.number,
                rules=rules,
                present=present,
                factor=push.factor,
                fetches=receiver is not None,
                versions=None if read is None else tuple(read[index] for index in indices),
            )
            answer = self._links[part].request(
                message,
                lambda: [changes[index] for index in indices],
                None if receiver is None else self._taker(part, indices, receiver),
            )
            versions.update(zip(indices, answer.versions, strict=True))

        self._each(push_part)
        return versions

    @override
    def finish_step(self, bound: int | None) -> None:
        self._links[0].finish_step(bound)

    @override
    def saved(self) -> None:
        for link in self._links:
            link.saved()

    # Synchronous steps

    @property
    @override
    def version(self) -> int:
        return min(link.step for link in self._links)

    @override
    def push_together(self, push: Push, label: int, *, waits: bool) -> bool:
        rules, present = told_rules(push.rules), tuple(push.present)
        changes = self._changes(push, range(len(self.shards)))
        counts = []

        def push_part(part: int) -> None:
            link = self._links[part]
            message = PushTogether(
                number=push.number,
                # The server's own: where not all gradients of a step are needed, servers may count different ones.
                label=link.step,
                rules=rules,
                present=present,
                waits=waits,
                timeout_sec=link.timeout_sec,
            )
            answer = link.request(message, lambda: [changes[index] for index in self._parts[part]], waits=True)
            counts.append(answer.counts)

        self._each(push_part)
        return all(counts)

    # Parts

    def log(self) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """Return worker and number of the last pushes of each shard, the oldest first, and the workers' clocks."""
        answers = [link.request(ReadLog()) for link in self._links]
        return [list(each) for answer in answers for each in answer.log], list(answers[0].clocks)

    def _changes(self, push: Push, order: Sequence[int]) -> dict[int, Array]:
        """Return what is pushed to each shard, which is kept until every server has it."""
        changes = {}
        for index in order:
            change = push.change(self.shards[index])
            changes[index] = change if push.is_kept else change.copy()
        return changes

    def _taker(
        self, part: int, indices: Sequence[int], receiver: Callable[[int], Receive]
    ) -> Callable[[ArrayChannel], None]:
        def take(channel: ArrayChannel) -> None:
            for index in indices:
                shard = self.shards[index]
                values = self._memory[part][: shard.nbytes].view(shard.dtype.value)
                channel.receive_array(values, timeout_sec=_SILENCE_SEC)
                receiver(index)(values)

        return take

    def _own(self, part: int, indices: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of shards in their segment."""
        return tuple(index - self._parts[part].start for index in indices)

    def _each(self, call: Callable[[int], T]) -> list[T]:
        """Call this for every server, at the same time; raise the first error when all have ended."""
        if self._threads is None:
            return [call(part) for part in range(len(self._links))]
        futures = [self._threads.submit(call, part) for part in range(len(self._links))]
        for future in futures:
            future.exception()
        return [future.result() for future in futures]

    @override
    def retire(self) -> None:
        if self._is_open:
            for link in self._links:
                link.retire()

    @property
    @override
    def is_open(self) -> bool:
        return self._is_open

    @override
    def leave(self) -> None:
        if self._is_open:
            self._is_open = False
            for link in self._links:
                link.leave()
            if self._threads is not None:
                self._threads.shutdown()
