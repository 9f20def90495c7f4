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

from unidist.errors import PeerLostError, StalledError
from unidist_parameter_server.optimizers import Rule
from unidist_parameter_server.store.applying import apply_change
from unidist_parameter_server.store.clocks import Clocks, Membership, StepArrivals, listed
from unidist_parameter_server.store.interface import Contents, Push, Receive, Store
from unidist_parameter_server.store.locks import ProcessLocks
from unidist_parameter_server.store.memory import ShardMemory, StoreShape, make_arrays
from unidist_parameter_server.store.waiting import wait_until

Array = np.ndarray[Any, np.dtype[Any]]

_VERSION, _CLOSED = 0, 1


class SharedStore(Store):
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
        self._journaled: int | None = None  # the shard whose change may not be complete
        self._board, self._memory = make_arrays(shape, memory)
        self._clocks = Clocks(self._board.clocks, self._board.members)
        self._arrivals = StepArrivals(self._board.arrived, self._board.counted, needed)
        self._present = self._board.present.reshape(shape.num_workers, shape.num_parameters)
        self._board_lock = len(self.shards)
        largest: dict[str, int] = {}
        for shard in self.shards:
            largest[shard.dtype.value] = max(shard.count, largest.get(shard.dtype.value, 0))
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
                self._write_journal(index, push.change(self.shards[index]), push.rules, push.present, factor)
                shard.journals[self.worker].numbers[self.worker] = push.number
                if self._log_length:
                    shard.log.reshape(-1, 2)[shard.version % self._log_length] = self.worker, push.number
                self._advance(index)
            if receive is not None:
                receive(shard.contents.values)
            return shard.version

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
        for shard, memory in zip(self.shards, self._memory, strict=True):
            memory.inbox[self.worker][:] = push.change(shard)
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
        present = np.any(self._present[members], axis=0).tolist()
        number = len(self.shards)
        order = [(self.worker * number // self.num_workers + k) % number for k in range(number)]
        pending = [index for index in order if self._memory[index].version <= label]
        while pending:
            left = []
            for index in pending:
                if self._memory[index].version > label:
                    continue
                if not self._locks.try_lock(index):
                    left.append(index)
                    continue
                try:
                    self._memory[index].complete()
                    if self._memory[index].version <= label:
                        self._apply_mean(index, members, push, present)
                finally:
                    self._locks.unlock(index)
            if left == pending:  # others apply these
                self._wait_for_others(left[-1], label)
            pending = left
        # All shards have the version label + 1; the first worker to see that records it.
        with self._locks.hold(self._board_lock, self._wait_for_board):
            self._board.numbers[_VERSION] = max(self.version, label + 1)

    def _wait_for_others(self, index: int, label: int) -> None:
        """Wait until a shard was changed in a step, or its lock is free."""
        self._wait_for_lock(index, lambda: self._memory[index].version > label or self._locks.holder(index) == 0)

    def _apply_mean(self, index: int, members: Sequence[int], push: Push, present: Sequence[bool]) -> None:
        shard, memory = self.shards[index], self._memory[index]
        mean = self._scratch[shard.dtype.value][2][: shard.count]
        mean[:] = memory.inbox[members[0]]
        for worker in members[1:]:
            mean += memory.inbox[worker]
        if len(members) > 1:
            mean *= 1.0 / len(members)
        self._write_journal(index, mean, push.rules, present, push.factor)
        self._advance(index)

    # Arithmetic

    def _advance(self, index: int) -> None:
        """Make the contents of the journal those of a shard. The caller holds its lock."""
        self._journaled = index
        self._memory[index].advance(self.worker)
        self._journaled = None

    def _write_journal(
        self, index: int, change: Array, rules: Sequence[Rule], present: Sequence[bool], factor: float
    ) -> None:
        """Write the next contents of a shard to the journal, completely. The caller holds its lock."""
        if self._journaled is not None and self._journaled != index:  # an exception came in between
            interrupted, self._journaled = self._journaled, None
            with self._locked(interrupted):
                pass
        shard, memory = self.shards[index], self._memory[index]
        before, after = memory.contents, memory.journals[self.worker]
        after.numbers[:] = before.numbers
        scratch = self._scratch[shard.dtype.value]
        apply_change(shard, before, after, change, rules, present, factor, (scratch[0], scratch[1]))

    # Other workers

    def _liveness(self, worker: int) -> int:
        """Return the number of the lock that a worker holds as long as it is alive."""
        return len(self.shards) + 1 + worker

    def _is_alive(self, worker: int) -> bool:
        if worker == self.worker:
            return True
        is_member = self._board.members[worker] == Membership.ACTIVE
        return bool(is_member) and self._locks.holder(self._liveness(worker)) != 0

    @contextmanager
    def _locked(self, index: int) -> Iterator[ShardMemory]:
        """Hold the lock of a shard, and complete what a worker before has not."""
        with self._locks.hold(index, lambda condition: self._wait_for_lock(index, condition)):
            memory = self._memory[index]
            memory.complete()
            yield memory

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

    @property
    @override
    def is_open(self) -> bool:
        return self._locks.is_open

    @override
    def leave(self) -> None:
        if self._locks.is_open:
            self._clocks.leave(self.worker)
            self._locks.close()
