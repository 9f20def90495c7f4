"""The store without a server: memory that all workers of a host map; who pushes applies.

A shard is changed and read under its lock, which the kernel releases when its holder dies. `memory` says why nothing is
torn then. Beside each shard is the number of each worker's last push, so that none is applied twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
from typing_extensions import override

from unidist.algorithms import copy_memory
from unidist.errors import PeerLostError, StalledError
from unidist_parameter_server.optimizers import Rule
from unidist_parameter_server.store.applying import apply_change
from unidist_parameter_server.store.clocks import Clocks, StepArrivals, WorkerState, listed
from unidist_parameter_server.store.flat import FlatChange, FlatTargets
from unidist_parameter_server.store.interface import Contents, Push, Receive, Store
from unidist_parameter_server.store.locks import ProcessLocks
from unidist_parameter_server.store.memory import ShardMemory, StoreShape, make_arrays
from unidist_parameter_server.store.native import native_shards
from unidist_parameter_server.store.shards import StoreShard
from unidist_parameter_server.store.waiting import wait_until

Array = np.ndarray[Any, np.dtype[Any]]

_VERSION, _CLOSED = 0, 1


class SharedMemoryStore(Store):
    """One worker's view of the store. Its creation is collective, by `barrier`.

    Args:
        shape: of the store, equal on every worker.
        slots: names of the optimizer's arrays.
        memory: `shape.nbytes` bytes, zero at first, which all workers map.
        locks: of this process, on the file of this store.
        worker: number of this worker.
        needed: number of gradients that make a synchronous step.
        barrier: returns when all workers have called it.
        timeout: longest wait for other workers.
        memory_owner: kept as long as the store.
        inboxes: flat memory of each worker's gradients, which all workers map, if a worker leaves its gradient alone
            until they are applied. Else those of synchronous steps are copied to the store (`StoreShape.collects`).
    """

    def __init__(
        self,
        shape: StoreShape,
        slots: Sequence[str],
        memory: memoryview,
        locks: ProcessLocks,
        worker: int,
        *,
        needed: int,
        barrier: Callable[[], None],
        timeout: timedelta,
        memory_owner: Any = None,
        inboxes: Sequence[Sequence[Array]] = (),
    ) -> None:
        self.shards = shape.shards
        self.slots = tuple(slots)
        self.worker = worker
        self.num_workers = shape.num_workers
        self._locks = locks
        self._needed = needed
        self._barrier = barrier
        self._timeout = timeout
        self._memory_owner = memory_owner
        self._log_length = shape.log_length
        self._changing: int | None = None  # the shard that has to be restored before this worker's journal is used
        self._board, self._memory = make_arrays(shape, memory)
        self._clocks = Clocks(self._board.clocks, self._board.members)
        self._arrivals = StepArrivals(self._board.arrived, self._board.counted, needed)
        self._inboxes = inboxes or self._board.inboxes
        self._inbox_addresses = np.array([[array.ctypes.data for array in each] for each in self._inboxes], np.int64)
        self._targets: FlatTargets | None = None  # the last ones
        self._copied = np.full(len(self.shards), -1)  # versions of the shards that a step has copied to these
        self._present = self._board.present.reshape(shape.num_workers, shape.num_parameters)
        self._board_lock = len(self.shards)
        largest: dict[str, int] = {}
        for shard in self.shards:
            largest[shard.dtype.value] = max(shard.count, largest.get(shard.dtype.value, 0))
        self._native = native_shards(shape, self._board, self._memory, self._inbox_addresses, locks, worker)
        self._scratch = {dtype: tuple(np.empty(count, dtype) for _ in range(3)) for dtype, count in largest.items()}
        self._join()

    def _join(self) -> None:
        taken = self._locks.try_lock(self._liveness(self.worker))
        assert taken, f"worker {self.worker} is in use by process {self._locks.holder(self._liveness(self.worker))}"
        for index, memory in enumerate(self._memory):  # before this worker's journal is written to
            if memory.is_interrupted:
                with self._locked(index):
                    pass
        self._board.processes[self.worker] = os.getpid()
        self._board.times[self.worker] = time.monotonic_ns()
        self._clocks.join(self.worker)
        self._barrier()

    # Contents

    @override
    def fill(self, write: Callable[[Any, Contents], None]) -> None:
        self._barrier()  # everybody has ended the step before
        for index in range(self.worker, len(self.shards), self.num_workers):
            contents = self._memory[index].contents
            write(self.shards[index], Contents(contents.values, contents.slots, contents.counts))
        self._barrier()

    @override
    def read(self, index: int, receive: Receive) -> int:
        with self._locked(index) as shard:
            receive(shard.contents.values)
            return shard.version

    @override
    def contents(self, index: int, receive: Callable[[Contents], None]) -> None:
        with self._locked(index) as shard:
            receive(Contents(shard.contents.values, shard.contents.slots, shard.contents.counts))

    def log(self, index: int) -> list[tuple[int, int]]:
        """Return worker and number of the last pushes that were applied to a shard at once, the oldest first."""
        version = self._memory[index].version
        entries = self._memory[index].log.reshape(-1, 2)
        first = max(0, version - self._log_length)
        return [(int(entries[k % len(entries)][0]), int(entries[k % len(entries)][1])) for k in range(first, version)]

    def last_pushes(self) -> list[int]:
        """Return for each shard the number of this worker's last push that was applied."""
        return [int(memory.contents.numbers[self.worker]) for memory in self._memory]

    @property
    def clocks(self) -> list[int]:
        """The clocks of all workers."""
        return [int(clock) for clock in self._board.clocks]

    # Pushes that are applied at once

    @override
    def push(self, index: int, push: Push, receive: Receive | None = None, *, waits: bool = True) -> int | None:
        if not waits and not self._locks.try_lock(index):
            return None
        with self._locked(index) as shard:  # a process may take a lock that it has
            if shard.contents.numbers[self.worker] < push.number:
                factor = push.factor
                if push.read_versions is not None:
                    factor /= max(1, shard.version - push.read_versions[index])
                self._apply(index, push.change(self.shards[index]), push.rules, push.present, factor, push.number)
            if receive is not None:
                receive(shard.contents.values)
            return shard.version

    @override
    def push_all(
        self, order: Sequence[int], push: Push, receiver: Callable[[int], Receive] | None = None
    ) -> dict[int, int]:
        targets = receiver if isinstance(receiver, FlatTargets) else None
        rules = self._native.rules(push) if self._native is not None else None
        if self._native is None or rules is None or (receiver is not None and targets is None):
            return super().push_all(order, push, receiver)
        self._restore_interrupted()
        pending = order
        while pending := self._wait_for_any(pending, self._native.push(pending, push, rules, targets)):
            pass
        return self._native.versions(order)

    @override
    def read_all(self, order: Sequence[int], receiver: Callable[[int], Receive]) -> dict[int, int]:
        if self._native is None or not isinstance(receiver, FlatTargets):
            return super().read_all(order, receiver)
        versions = {}
        if receiver is self._targets:
            versions = {
                index: version
                for index, version in zip(order, self._copied[list(order)].tolist(), strict=True)
                if version == self._memory[index].version
            }
        self._targets = receiver
        self._copied[:] = -1
        left = [index for index in order if index not in versions]
        pending = left
        while pending := self._wait_for_any(pending, self._native.fetch(pending, receiver)):
            pass
        return versions | self._native.versions(left)

    def _wait_for_any(self, tried: Sequence[int], busy: list[int]) -> list[int]:
        """Return the shards that were busy; if all of these were, wait until the first one is not."""
        if busy and len(busy) == len(tried):
            self._wait_for_lock(busy[0], lambda: self._locks.holder(busy[0]) == 0)
        return busy

    @override
    def finish_step(self, bound: int | None) -> None:
        self._board.times[self.worker] = time.monotonic_ns()
        self._clocks.finish_step(self.worker)
        if not self._clocks.waits_for(self.worker, bound):
            return

        def look(seconds: float) -> None:
            for other in self._clocks.waits_for(self.worker, bound):
                if not self._is_alive(other):
                    self._clocks.leave(other)

        try:
            wait_until(lambda: not self._clocks.waits_for(self.worker, bound), self._timeout, look)
        except TimeoutError:
            raise self._stalled(self._clocks.waits_for(self.worker, bound), f"may be {bound} steps ahead of") from None

    # Synchronous steps

    @property
    @override
    def version(self) -> int:
        return int(self._board.numbers[_VERSION])

    @override
    def push_together(self, push: Push, label: int, *, waits: bool) -> bool:
        self._board.times[self.worker] = time.monotonic_ns()
        self._clocks.finish_step(self.worker)
        self._finish_closed_step(push)
        if self._arrivals.is_late(self.worker, label, self.version, is_closed=False):
            return False
        self._collect(push.change)
        self._present[self.worker] = push.present
        with self._locks.hold(self._board_lock, self._wait_for_board):
            closed = self._board.numbers[_CLOSED] == label + 1
            if self._arrivals.is_late(self.worker, label, self.version, is_closed=closed):
                return False
            self._arrivals.arrive(self.worker, label)
            if self._arrivals.try_to_close(label):
                self._board.numbers[_CLOSED] = label + 1
        if waits:
            self._wait_for_step(push, label)
        else:
            self._finish_closed_step(push)
        return True

    def _collect(self, change: Callable[[StoreShard], Array]) -> None:
        """Write this worker's gradient to its inbox, if it is not there."""
        own = self._inboxes[self.worker]
        if isinstance(change, FlatChange):
            if not np.array_equal(change.addresses, self._inbox_addresses[self.worker]):
                for array, memory in zip(own, change.memories, strict=True):
                    if copy_memory is not None:
                        copy_memory(array.ctypes.data, memory.ctypes.data, array.nbytes)
                    else:
                        array[:] = memory[: len(array)]
        else:
            for shard in self.shards:
                own[shard.memory][shard.begin : shard.begin + shard.count] = change(shard)

    def _wait_for_step(self, push: Push, label: int) -> None:
        def look(seconds: float) -> None:
            missing = self._arrivals.missing(label)
            gone = [worker for worker in missing if not self._is_alive(worker)]
            if self.version <= label and self.num_workers - len(gone) < self._needed:
                raise PeerLostError(
                    f"{listed(gone)} was lost or has ended, and worker {self.worker} waits for its gradient in step "
                    f"{label + 1}, which needs {self._needed} of {self.num_workers} gradients. Every rank makes the "
                    "same number of steps",
                    ranks=gone,
                )

        try:
            while self.version <= label:
                wait_until(lambda: self.version > label or self._is_closed(label), self._timeout, look)
                self._finish_closed_step(push)
        except TimeoutError:
            raise self._stalled(self._arrivals.missing(label), f"needs for step {label + 1}") from None

    def _is_closed(self, label: int) -> bool:
        return bool(self._board.numbers[_CLOSED] == label + 1)

    def _finish_closed_step(self, push: Push) -> None:
        """Apply what is left to apply of a step that is closed. Any worker may do it; several do it together."""
        label = self.version
        if not self._is_closed(label):
            return
        members = self._arrivals.members()
        present = np.any(self._present[members], axis=0)
        self._restore_interrupted()
        number = len(self.shards)
        order = [(self.worker * number // self.num_workers + k) % number for k in range(number)]
        pending = [index for index in order if self._memory[index].version <= label]
        rules = self._native.rules(push) if self._native is not None else None
        while pending:
            if self._native is not None and rules is not None:
                left = self._native.step(
                    pending, label, rules, present.view(np.uint8), members, push.factor, self._targets, self._copied
                )
            else:
                left = self._apply_means(pending, label, members, push, present.tolist())
            if len(left) == len(pending):  # others apply these
                self._wait_for_others(left[-1], label)
            pending = left
        # All shards have the version label + 1; the first worker to see that records it.
        with self._locks.hold(self._board_lock, self._wait_for_board):
            self._board.numbers[_VERSION] = max(self.version, label + 1)

    def _wait_for_others(self, index: int, label: int) -> None:
        """Wait until a shard was changed in a step, or its lock is free."""
        self._wait_for_lock(index, lambda: self._memory[index].version > label or self._locks.holder(index) == 0)

    def _apply_means(
        self, pending: Sequence[int], label: int, members: Sequence[int], push: Push, present: Sequence[bool]
    ) -> list[int]:
        """Apply a closed step to shards that do not have it, and return those that other workers use."""
        left = []
        for index in pending:
            memory, shard = self._memory[index], self.shards[index]
            if memory.version > label:
                continue
            if not self._locks.try_lock(index):
                left.append(index)
                continue
            try:
                self._restore(index)
                if memory.version <= label:
                    span = slice(shard.begin, shard.begin + shard.count)
                    mean = self._scratch[shard.dtype.value][2][: shard.count]
                    mean[:] = self._inboxes[members[0]][shard.memory][span]
                    for worker in members[1:]:
                        mean += self._inboxes[worker][shard.memory][span]
                    if len(members) > 1:
                        mean *= 1.0 / len(members)
                    self._apply(index, mean, push.rules, present, push.factor)
            finally:
                self._locks.unlock(index)
        return left

    # Arithmetic

    def _apply(
        self,
        index: int,
        change: Array,
        rules: Sequence[Rule],
        present: Sequence[bool],
        factor: float,
        number: int | None = None,
    ) -> None:
        """Make the next version of a shard, whose lock the caller holds, from a change.

        Args:
            index: of the shard.
            change: a gradient, or a difference.
            rules: for each parameter.
            present: for each parameter.
            factor: of the rate.
            number: of this worker's push; None: the change is that of a synchronous step.
        """
        self._restore_interrupted(index)
        shard, memory = self.shards[index], self._memory[index]
        contents, scratch = memory.contents, self._scratch[shard.dtype.value]
        self._changing = index
        try:
            memory.begin(self.worker)
            apply_change(shard, contents, contents, change, rules, present, factor, (scratch[0], scratch[1]))
            if number is not None:
                contents.numbers[self.worker] = number
                if self._log_length:
                    memory.log.reshape(-1, 2)[memory.version % self._log_length] = self.worker, number
            memory.commit()
        except BaseException:
            memory.restore()
            raise
        self._changing = None

    def _restore_interrupted(self, locked: int | None = None) -> None:
        """Before this worker's journal is used: restore the shard that an exception has left with a change begun.

        Args:
            locked: a shard whose lock the caller holds.
        """
        interrupted, self._changing = self._changing, None
        if interrupted is not None and interrupted != locked:
            with self._locked(interrupted):
                pass

    # Other workers

    def _liveness(self, worker: int) -> int:
        """Return the number of the lock that a worker holds as long as it is alive."""
        return len(self.shards) + 1 + worker

    def _is_alive(self, worker: int) -> bool:
        if worker == self.worker:
            return True
        is_member = self._board.members[worker] == WorkerState.ACTIVE
        return bool(is_member) and self._locks.holder(self._liveness(worker)) != 0

    @contextmanager
    def _locked(self, index: int) -> Iterator[ShardMemory]:
        """Hold the lock of a shard, and undo what a worker has begun and not brought to its end."""
        with self._locks.hold(index, lambda condition: self._wait_for_lock(index, condition)):
            self._restore(index)
            yield self._memory[index]

    def _restore(self, index: int) -> None:
        if self._native is not None:
            self._native.restore(index)
        else:
            self._memory[index].restore()

    def _wait_for_board(self, condition: Callable[[], bool]) -> None:
        self._wait_for_lock(self._board_lock, condition)

    def _wait_for_lock(self, number: int, condition: Callable[[], bool]) -> None:
        try:
            wait_until(condition, self._timeout, lambda seconds: None)
        except TimeoutError:
            process = self._locks.holder(number)
            holders = [worker for worker, other in enumerate(self._board.processes) if other == process]
            what = "the table of clocks" if number == self._board_lock else f"shard {number}"
            raise StalledError(
                f"worker {self.worker} has waited {self._timeout.total_seconds():.0f} s for the lock of {what}, which "
                f"{listed(holders) if holders else 'somebody'} (process {process}) holds; it was stopped, or the "
                "machine is overloaded",
                ranks=holders,
            ) from None

    def _stalled(self, workers: Sequence[int], relation: str) -> StalledError:
        now = time.monotonic_ns()
        states = "; ".join(
            f"worker {worker} (process {self._board.processes[worker]}) has made {self._board.clocks[worker]} steps, "
            f"the last {(now - self._board.times[worker]) / 1e9:.0f} s ago"
            for worker in workers
        )
        return StalledError(
            f"worker {self.worker} has made {self._board.clocks[self.worker]} steps and waited "
            f"{self._timeout.total_seconds():.0f} s for {listed(workers)}, which it {relation}: {states}. Every rank "
            "makes the same number of steps",
            ranks=workers,
        )

    @override
    def retire(self) -> None:
        if self._locks.is_open:
            self._clocks.leave(self.worker)

    @property
    @override
    def is_open(self) -> bool:
        return self._locks.is_open

    @override
    def leave(self) -> None:
        if self._locks.is_open:
            self._clocks.leave(self.worker)
            self._locks.close()
