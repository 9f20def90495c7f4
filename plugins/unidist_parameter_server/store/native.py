"""Pushes to, and fetches from, the shards of a store in one call of C code; see `native/shards.h`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unidist_parameter_server.native import IS_BUILT, library
from unidist_parameter_server.optimizers import native_rules
from unidist_parameter_server.optimizers.native import TYPES, NativeRules
from unidist_parameter_server.store.flat import FlatChange, FlatTargets
from unidist_parameter_server.store.interface import Push
from unidist_parameter_server.store.locks import ProcessLocks
from unidist_parameter_server.store.memory import BLOCK_BYTES, INTENT_BYTES, ShardMemory, StoreBoard, StoreShape

Array = np.ndarray[Any, np.dtype[Any]]

_CACHED_BYTES = 1 << 20
"""If more than this is fetched, it is copied past the caches."""


def native_shards(
    shape: StoreShape,
    board: StoreBoard,
    memory: Sequence[ShardMemory],
    inboxes: Array,
    locks: ProcessLocks,
    worker: int,
) -> NativeShards | None:
    """Return the shards of a worker for C code; None if the extension was not built, or cannot change such shards."""
    if not IS_BUILT or shape.num_slots > library.MAX_SLOTS or shape.num_workers > library.MOST_SOURCES:
        return None
    assert (library.BLOCK_BYTES, library.INTENT_BYTES) == (BLOCK_BYTES, INTENT_BYTES)
    return NativeShards(shape, board, memory, inboxes, locks, worker)


class NativeShards:
    """Calls of C code, each over several shards. Made by `native_shards`.

    Shards that another process uses are left out by each of them, and returned.

    Args:
        shape: of the store.
        board: of the store.
        memory: its shards.
        inboxes: addresses of the gradients that are in memory which all workers map, `(workers, flat memories)`; none
            where they are elsewhere.
        locks: of this process; open.
        worker: this one.
    """

    def __init__(
        self,
        shape: StoreShape,
        board: StoreBoard,
        memory: Sequence[ShardMemory],
        inboxes: Array,
        locks: ProcessLocks,
        worker: int,
    ) -> None:
        self._worker = np.array([worker], np.int64)
        self._inboxes = inboxes
        self._num_slots = shape.num_slots
        self._versions = np.zeros(len(shape.shards), np.int64)
        rows: list[list[int]] = []
        pieces: list[list[int]] = []
        for shard, each in zip(shape.shards, memory, strict=True):
            contents = each.contents
            slots = [_address(slot) for slot in contents.slots] + [0] * (library.MAX_SLOTS - shape.num_slots)
            rows.append(
                [
                    *(_address(each.header), _address(contents.memory), *slots),
                    *(_address(contents.counts), _address(contents.numbers), _address(each.log)),
                    *(TYPES[shard.dtype.value], shard.count, shard.memory, shard.begin),
                    *(len(pieces), len(shard.pieces)),
                ]
            )
            pieces += [[piece.parameter, piece.start, piece.stop] for piece in shard.pieces]
        journals = [_address(journal.memory) for journal in memory[0].journals] if memory else []
        num_memories = 1 + max((shard.memory for shard in shape.shards), default=0)
        per_worker = [list(map(_address, arrays)) for arrays in (board.blocks, board.intents)]
        self._arrays = [np.array(table, np.int64) for table in (journals, *per_worker, inboxes, rows, pieces)]
        counts = [worker, shape.num_workers, shape.num_slots, num_memories, shape.log_length, shape.num_parameters]
        self._store = np.array([locks.descriptor, *counts, *map(_address, self._arrays), 0], np.int64)
        self._kept = board, memory

    def rules(self, push: Push) -> NativeRules | None:
        """Return the rules of a push in C; None: it cannot be applied there."""
        return native_rules(push.rules, self._num_slots) if isinstance(push.change, FlatChange) else None

    def push(self, order: Sequence[int], push: Push, rules: NativeRules, targets: FlatTargets | None) -> list[int]:
        """Apply a push to shards; see `Store.push_all`."""
        assert isinstance(push.change, FlatChange)
        present = np.array(push.present, np.uint8)
        read_versions = None if push.read_versions is None else np.array(push.read_versions, np.int64)
        remaining = np.array(order, np.int64)
        own = self._inboxes[self._worker[0]] if len(self._inboxes) else []
        can_redo = np.array_equal(push.change.addresses, own)
        busy = library.push(
            self._over(targets),
            _address(remaining),
            len(remaining),
            _address(rules.table),
            len(rules.table),
            _address(rules.numbers),
            _address(present),
            _address(push.change.addresses),
            _address(self._worker) if can_redo and len(rules.table) <= library.MOST_RULES else 0,
            push.factor,
            push.number,
            0 if read_versions is None else _address(read_versions),
            0 if targets is None else _address(targets.addresses),
            _address(self._versions),
        )
        return _listed(remaining[:busy])

    def step(
        self,
        order: Sequence[int],
        label: int,
        rules: NativeRules,
        present: Array,
        workers: Sequence[int],
        factor: float,
        targets: FlatTargets | None,
        versions: Array,
    ) -> list[int]:
        """Apply a synchronous step to shards that do not have it.

        Args:
            order: the shards.
            label: number of the step, from 0.
            rules: for each parameter.
            present: for each parameter, uint8.
            workers: of whose gradients the mean is applied.
            factor: of the rate.
            targets: to which the new values are copied.
            versions: set for each shard that was changed and copied.
        """
        remaining, members = np.array(order, np.int64), np.array(workers, np.int64)
        sources = self._inboxes[members]
        busy = library.step(
            self._over(targets),
            _address(remaining),
            len(remaining),
            _address(rules.table),
            len(rules.table),
            _address(rules.numbers),
            _address(present),
            _address(sources),
            _address(members) if len(rules.table) <= library.MOST_RULES else 0,
            len(sources),
            factor,
            label,
            0 if targets is None else _address(targets.addresses),
            _address(versions),
        )
        return _listed(remaining[:busy])

    def fetch(self, order: Sequence[int], targets: FlatTargets) -> list[int]:
        """Copy the values of shards."""
        remaining = np.array(order, np.int64)
        busy = library.fetch(
            self._over(targets),
            _address(remaining),
            len(remaining),
            _address(targets.addresses),
            _address(self._versions),
        )
        return _listed(remaining[:busy])

    def restore(self, index: int) -> None:
        """Bring a shard whose lock the caller holds to a version, if the worker that was changing it was killed."""
        library.restore(_address(self._store), index)

    def versions(self, order: Sequence[int]) -> dict[int, int]:
        """Return the versions of shards to which a push was applied, or which were fetched."""
        return dict(zip(order, self._versions[list(order)].tolist(), strict=True))

    def _over(self, targets: FlatTargets | None) -> int:
        self._store[-1] = targets is not None and targets.nbytes > _CACHED_BYTES
        return _address(self._store)


def _address(array: Array) -> int:
    return array.ctypes.data


def _listed(array: Array) -> list[int]:
    return [int(number) for number in array]
