"""The arrays of a store in shared memory.

A shard is changed in place, with an undo log, as databases have it. The worker that changes it notes in the shard's
header, by one store of 8 bytes, that it makes the next version. Then it saves the contents to its journal, part by
part, changes each part after it was saved, and advances the version, by another store of 8 bytes. If it is killed
before that, the next process that takes the lock copies back what was saved, and nothing has happened.

The C code in `native/shards.c` can do better where the gradients are in shared memory, too. It notes there what it
applies, and computes the new contents of 512 elements at a time in memory that stays in the cache, before it copies
them to the shard. If it is killed, the next process brings the change to its end (`redo` there).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unidist_parameter_server.store.shards import StoreShard

Array = np.ndarray[Any, np.dtype[Any]]

_ALIGNMENT = 64
_NUMBERS = 8
_VERSION, _NOTE, _SAVED, _MODE = 0, 1, 2, 3
_UNDO, _REDO = 0, 1
_WORKER_BITS = 16
BLOCK_BYTES = 512 * 8
"""Of the values of a block, and of each of its slots."""
INTENT_BYTES = 8 * (2 + 256 + 64 * 10)
"""Of what C code notes, besides 5 bytes for each parameter."""


@dataclass(frozen=True)
class StoreShape:
    """The sizes of a store's memory.

    Args:
        shards: of the parameters.
        num_slots: arrays of the optimizer.
        num_workers: number of workers.
        num_parameters: number of parameters.
        collects: gradients of a step are collected here before they are applied.
        log_length: number of updates that are remembered for each shard.
    """

    shards: Sequence[StoreShard]
    num_slots: int
    num_workers: int
    num_parameters: int
    collects: bool
    log_length: int = 0

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes."""
        carver = _Carver(None)
        _carve(self, carver)
        return carver.nbytes


@dataclass(frozen=True)
class ShardContents:
    """The arrays that change together with a shard.

    Args:
        values: of the parameters, `(count,)`.
        slots: of the optimizer.
        counts: number of updates of each piece, int64.
        numbers: the last push of each worker that was applied, int64.
        memory: all of these, uint8.
    """

    values: Array
    slots: tuple[Array, ...]
    counts: Array
    numbers: Array
    memory: Array


@dataclass(frozen=True)
class ShardMemory:
    """One shard. Hold its lock to change it or to read it.

    Args:
        header: the version; the note: the version that is being made, and by which worker; the number of elements that
            this one has saved; int64. More of it is C code's.
        contents: of the present version, unless `is_interrupted`.
        journals: for each worker, where it saves the contents before it changes them.
        log: worker and number of the push that made each version, `(log_length, 2)`, int64.
    """

    header: Array
    contents: ShardContents
    journals: tuple[ShardContents, ...]
    log: Array

    @property
    def version(self) -> int:
        """Number of updates of this shard."""
        return int(self.header[_VERSION])

    @property
    def is_interrupted(self) -> bool:
        """Whether a worker has begun to make the next version and did not come to its end."""
        return int(self.header[_NOTE]) >> _WORKER_BITS == self.version + 1

    def begin(self, worker: int) -> None:
        """Save the contents to a worker's journal; from then on it may change them."""
        self.journals[worker].memory[:] = self.contents.memory
        self.header[_MODE] = _UNDO
        self.header[_SAVED] = len(self.contents.values)
        self.header[_NOTE] = (self.version + 1) << _WORKER_BITS | worker

    def commit(self) -> None:
        """Make the changed contents the next version."""
        self.header[_VERSION] = self.version + 1

    def restore(self) -> None:
        """Undo what was changed since `begin`, if there was no `commit`."""
        if self.is_interrupted:
            assert self.header[_MODE] == _UNDO, "C code has begun this change, and brings it to its end"
            journal = self.journals[int(self.header[_NOTE]) & ((1 << _WORKER_BITS) - 1)]
            saved = int(self.header[_SAVED])
            self.contents.values[:saved] = journal.values[:saved]
            for slot, kept in zip(self.contents.slots, journal.slots, strict=True):
                slot[:saved] = kept[:saved]
            self.contents.counts[:] = journal.counts
            self.contents.numbers[:] = journal.numbers
            self.header[_NOTE] = 0


@dataclass(frozen=True)
class StoreBoard:
    """Numbers that workers publish to each other; int64, each written by one store.

    Args:
        numbers: the number of synchronous steps that were applied; one above the label of the step that is closed.
        clocks: see `Clocks`; one for each worker, as all that follow.
        members: see `Clocks`.
        arrived: see `StepArrivals`.
        counted: see `StepArrivals`.
        processes: process identifiers.
        times: of the last step, in ns of the system's monotonic clock.
        present: which parameters have a gradient of the present step, `(workers, parameters)`, uint8.
        inboxes: for each worker its gradient of the present step, one array for each flat memory; empty where none are
            collected.
        blocks: for each worker the new contents of the block that it is changing.
        intents: for each worker what it applies, `struct ps_intent`.
    """

    numbers: Array
    clocks: Array
    members: Array
    arrived: Array
    counted: Array
    processes: Array
    times: Array
    present: Array
    inboxes: Sequence[Sequence[Array]]
    blocks: Sequence[Array]
    intents: Sequence[Array]


def make_arrays(shape: StoreShape, memory: memoryview) -> tuple[StoreBoard, list[ShardMemory]]:
    """Return the arrays over memory of `shape.nbytes`, which is zero at first."""
    return _carve(shape, _Carver(memory))


class _Carver:
    """Gives out pieces of memory one after the other; without memory it measures.

    Args:
        memory: all of it, or None.
        begin: offset of the first piece.
    """

    def __init__(self, memory: memoryview | None, begin: int = 0) -> None:
        self.memory = memory
        self.nbytes = begin

    def array(self, dtype: str, count: int) -> Array:
        """Return the next piece."""
        kind = np.dtype(dtype)
        offset = self.nbytes
        self.nbytes += -(-count * kind.itemsize // _ALIGNMENT) * _ALIGNMENT
        if self.memory is None or not count:
            return np.empty(0, kind)
        return np.frombuffer(self.memory, kind, count, offset)

    def contents(self, shape: StoreShape, shard: StoreShard) -> ShardContents:
        """Return the next pieces as the contents of a shard."""
        begin = self.nbytes
        dtype = shard.dtype.value
        values = self.array(dtype, shard.count)
        slots = tuple(self.array(dtype, shard.count) for _ in range(shape.num_slots))
        counts = self.array("int64", len(shard.pieces))
        numbers = self.array("int64", shape.num_workers)
        whole = np.empty(0, np.uint8)
        if self.memory is not None:
            whole = np.frombuffer(self.memory, np.uint8, self.nbytes - begin, begin)
        return ShardContents(values, slots, counts, numbers, whole)


def _carve(shape: StoreShape, carver: _Carver) -> tuple[StoreBoard, list[ShardMemory]]:
    workers = shape.num_workers
    numbers = carver.array("int64", _NUMBERS)
    clocks, members, arrived, counted, processes, times = (carver.array("int64", workers) for _ in range(6))
    present = carver.array("uint8", workers * shape.num_parameters)
    inboxes = []
    for _ in range(workers if shape.collects else 0):
        inboxes.append([carver.array(dtype, count) for dtype, count in _flat_memories(shape.shards)])
    blocks = [carver.array("uint8", (1 + shape.num_slots) * BLOCK_BYTES) for _ in range(workers)]
    intents = [carver.array("uint8", INTENT_BYTES + 5 * shape.num_parameters) for _ in range(workers)]
    board = StoreBoard(numbers, clocks, members, arrived, counted, processes, times, present, inboxes, blocks, intents)
    journals = []
    for _ in range(workers):
        begin, end = carver.nbytes, carver.nbytes
        views = []
        for shard in shape.shards:  # one at a time: all are at the same place
            place = _Carver(carver.memory, begin)
            views.append(place.contents(shape, shard))
            end = max(end, place.nbytes)
        journals.append(views)
        carver.nbytes = end
    shards = []
    for index, shard in enumerate(shape.shards):
        header = carver.array("int64", _NUMBERS)
        contents = carver.contents(shape, shard)
        log = carver.array("int64", 2 * shape.log_length)
        shards.append(ShardMemory(header, contents, tuple(views[index] for views in journals), log))
    return board, shards


def _flat_memories(shards: Sequence[StoreShard]) -> list[tuple[str, int]]:
    """Return type and number of elements of each flat memory that was cut into shards."""
    counts: dict[int, tuple[str, int]] = {}
    for shard in shards:  # those of a memory follow each other
        counts[shard.memory] = shard.dtype.value, shard.begin + shard.count
    return [counts.get(number, ("uint8", 0)) for number in range(1 + max(counts, default=-1))]
