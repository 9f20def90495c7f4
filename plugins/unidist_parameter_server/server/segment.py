"""The state of a segment on a server: its shards, and the clocks of the workers. No sockets; from many threads.

A push is applied to each shard once, and under the shard's lock; a change of the clocks, or of a synchronous step,
under one lock of the segment. A worker whose connection has ended may come back within a second. After that it counts
as lost, and nobody waits for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from unidist.errors import PeerLostError, StalledError, UnidistError
from unidist_parameter_server.optimizers import Rule
from unidist_parameter_server.store.applying import apply_change
from unidist_parameter_server.store.clocks import Clocks, StepArrivals, WorkerState, listed
from unidist_parameter_server.store.memory import ShardContents
from unidist_parameter_server.wire import SegmentLayout

Array = np.ndarray[Any, np.dtype[Any]]

_GRACE_SEC = 1.0
_TAKEOVER_GRACE_SEC = 10.0
_LOOK_SEC = 0.1


class DeposedError(UnidistError):
    """Another server goes on with a segment; this one has no say any more."""


class Replica(Protocol):
    """A second place where changes are applied before they are acknowledged."""

    def fill(self, index: int, arrays: Sequence[Array]) -> None:
        """Pass on what a shard was filled with; see `SegmentShard.arrays`. Called under the shard's lock."""

    def submit(
        self,
        index: int,
        version: int,
        pushes: Sequence[tuple[int, int]],
        change: Array,
        rules: Sequence[Rule],
        present: Sequence[bool],
        factor: float,
    ) -> None:
        """Pass on one change of a shard. Called under the shard's lock, so in the order of its versions.

        Args:
            index: of the shard in the segment.
            version: of the shard after the change.
            pushes: worker and number of each push that is in it.
            change: as `Push.change` returns it; not kept.
            rules: for each parameter.
            present: for each parameter.
            factor: of the learning rate, or the difference.
        """

    def wait(self) -> None:
        """Return when all that this thread has submitted is on the other server, or that was lost and is not needed.

        Raises:
            DeposedError: the other server has taken the segment over.
        """


class SegmentShard:
    """A shard, and what is kept of it. Hold `lock` to read or change it."""

    def __init__(self, layout: SegmentLayout, number: int) -> None:
        shard = layout.shards[number]
        self.shard = shard
        self.lock = threading.Lock()
        self.version = 0
        dtype = np.dtype(shard.dtype.value)
        self.contents = ShardContents(
            np.zeros(shard.count, dtype),
            tuple(np.zeros(shard.count, dtype) for _ in range(layout.num_slots)),
            np.zeros(len(shard.pieces), np.int64),
            np.zeros(layout.num_workers, np.int64),
            np.empty(0, np.uint8),
        )
        self.log: list[tuple[int, int]] = []

    @property
    def arrays(self) -> list[Array]:
        """Everything that is filled: values, slots, and numbers of updates."""
        return [self.contents.values, *self.contents.slots, self.contents.counts]


class StoreSegment:
    """The shards of one store on one server.

    Args:
        layout: the same for every worker.
    """

    def __init__(self, layout: SegmentLayout) -> None:
        self.layout = layout
        self.shards = [SegmentShard(layout, number) for number in range(len(layout.shards))]
        self.replica: Replica | None = None
        workers = layout.num_workers
        self._turn = threading.Condition()
        self._clock_numbers = [0] * workers
        self._members: list[int] = [WorkerState.ABSENT] * workers
        self._clocks = Clocks(self._clock_numbers, self._members)
        self._finished = [0] * workers  # steps that each worker has said to have finished
        self._times = [time.monotonic()] * workers
        self._gone_since: dict[int, float] = {}
        self._step = 0
        self._pushed = [0] * workers  # number of each worker's last push for a step
        self._arrived = [0] * workers
        self._arrivals = StepArrivals(self._arrived, [0] * workers, layout.needed)
        self._present: list[Sequence[bool]] = [()] * workers
        self._inboxes: list[list[Array]] = [
            [np.empty_like(each.contents.values) for each in self.shards] if layout.needed else []
            for _ in range(workers)
        ]
        largest: dict[str, int] = {}
        for shard in layout.shards:
            largest[shard.dtype.value] = max(shard.count, largest.get(shard.dtype.value, 0))
        self._largest = largest
        self._local = threading.local()
        self._is_deposed = self._is_promoted = False

    # Workers

    def join(self, worker: int, finished: int) -> None:
        """A worker has a connection: it counts from now on, or again.

        Args:
            worker: its number.
            finished: number of steps that it has finished, as of `finish_step`.
        """
        with self._turn:
            self._gone_since.pop(worker, None)
            if self._members[worker] != WorkerState.ACTIVE:
                self._clocks.join(worker)
                self._times[worker] = time.monotonic()
            self._advance(worker, finished)
            self._turn.notify_all()

    def disconnected(self, worker: int) -> None:
        """A worker's connection has ended, and it did not say that it leaves."""
        with self._turn:
            if self._members[worker] == WorkerState.ACTIVE:
                self._gone_since[worker] = time.monotonic()

    def leave(self, worker: int) -> None:
        """A worker has ended."""
        with self._turn:
            self._clocks.leave(worker)
            self._turn.notify_all()

    @property
    def is_left(self) -> bool:
        """Whether every worker has left, or was lost a while ago."""
        with self._turn:
            active = [worker for worker in self._clocks.active if not self._is_lost(worker)]
            return not active and WorkerState.ABSENT not in self._members

    @property
    def clocks(self) -> list[int]:
        """The clocks of all workers."""
        with self._turn:
            return list(self._clock_numbers)

    # Pushes that are applied at once

    def push(
        self,
        index: int,
        worker: int,
        number: int,
        change: Array,
        rules: Sequence[Rule],
        present: Sequence[bool],
        factor: float,
        read_version: int | None,
    ) -> int:
        """Apply a worker's push to a shard, unless it was applied before, and return the shard's version.

        Args:
            index: of the shard.
            worker: whose push.
            number: of the push.
            change: `(count,)`.
            rules: for each parameter.
            present: for each parameter.
            factor: of the rate.
            read_version: see `Push.read_versions`.
        """
        each = self.shards[index]
        with each.lock:
            if each.contents.numbers[worker] < number:
                if read_version is not None:
                    factor /= max(1, each.version - read_version)
                self._apply(index, [(worker, number)], change, rules, present, factor)
            return each.version

    def read(self, index: int, copy_to: Array) -> int:
        """Copy the values of a shard, all of one version; return that."""
        each = self.shards[index]
        with each.lock:
            copy_to[:] = each.contents.values
            return each.version

    def replicated(
        self,
        index: int,
        version: int,
        pushes: Sequence[tuple[int, int]],
        change: Array,
        rules: Sequence[Rule],
        present: Sequence[bool],
        factor: float,
    ) -> None:
        """Apply a change that the other server has applied; see `Replica.submit`.

        Raises:
            DeposedError: that server has no say any more: this one was promoted.
        """
        each = self.shards[index]
        with each.lock:
            if self._is_promoted:
                raise DeposedError("this server has the segment now")
            assert version == each.version + 1, f"change {version} of shard {index} follows change {each.version}"
            self._apply(index, pushes, change, rules, present, factor)

    def finish_step(self, worker: int, finished: int, bound: int | None, timeout_sec: float) -> None:
        """Advance a worker's clock, and wait as `Store.finish_step`.

        Args:
            worker: whose clock.
            finished: number of steps that it has finished; not counted again if it says so again.
            bound: of its lead; None: any.
            timeout_sec: longest wait.

        Raises:
            StalledError: names who is waited for.
        """
        with self._turn:
            self._advance(worker, finished)
            self._times[worker] = time.monotonic()
            self._turn.notify_all()
            deadline = time.monotonic() + timeout_sec
            while waiting := self._clocks.waits_for(worker, bound):
                for other in waiting:
                    if self._is_lost(other):
                        self._clocks.leave(other)
                if not self._clocks.waits_for(worker, bound):
                    break
                self._wait(deadline, worker, waiting, f"may be {bound} steps ahead of")

    # Synchronous steps

    @property
    def step(self) -> int:
        """Number of synchronous steps that were applied."""
        with self._turn:
            return self._step

    def push_together(
        self,
        worker: int,
        number: int,
        label: int,
        present: Sequence[bool],
        rules: Sequence[Rule],
        receive: Callable[[Sequence[Array]], None],
        *,
        waits: bool,
        timeout_sec: float,
    ) -> bool:
        """Take a worker's gradient for a step, and wait for that as `Store.push_together`; return whether it counts.

        Args:
            worker: whose push.
            number: of the push; one that has come before counts as it did then.
            label: number of the steps that had been applied when the worker read.
            present: for each parameter.
            rules: for each parameter; equal on all workers.
            receive: fills one array for each shard.
            waits: until the step has been applied.
            timeout_sec: longest wait.

        Raises:
            PeerLostError: too few workers are left. StalledError: one does not push; names it.
        """
        with self._turn:
            came_before = number <= self._pushed[worker]
            if not came_before:
                self._clocks.finish_step(worker)
                self._times[worker] = time.monotonic()
            is_late = came_before or self._arrivals.is_late(worker, label, self._step, is_closed=False)
        receive(self._scratch_arrays() if is_late else self._inboxes[worker])
        with self._turn:
            if came_before:
                counts = self._arrived[worker] == label + 1 or self._step > label
            else:
                self._pushed[worker] = number
                counts = not is_late and label == self._step
                if counts:
                    self._present[worker] = present
                    self._arrivals.arrive(worker, label)
                    self._close_step(label, rules)
            if counts and waits:
                self._wait_for_step(worker, label, timeout_sec)
            return counts

    def _close_step(self, label: int, rules: Sequence[Rule]) -> None:
        """Apply a step if enough gradients have arrived."""
        if not self._arrivals.try_to_close(label):
            return
        members = self._arrivals.members()
        present = np.any([self._present[worker] for worker in members], axis=0).tolist()
        pushes = [(worker, self._pushed[worker]) for worker in members]
        for index, each in enumerate(self.shards):
            if each.version > label:
                continue  # the server before this one has come so far
            mean = self._inboxes[members[0]][index]
            if len(members) > 1:
                mean = mean.copy()
                for worker in members[1:]:
                    mean += self._inboxes[worker][index]
                mean *= 1.0 / len(members)
            with each.lock:
                self._apply(index, pushes, mean, rules, present, 1.0)
        if self.replica is not None:
            self.replica.wait()
        self._step = label + 1
        self._turn.notify_all()

    def _wait_for_step(self, worker: int, label: int, timeout_sec: float) -> None:
        deadline = time.monotonic() + timeout_sec
        while self._step <= label:
            missing = self._arrivals.missing(label)
            gone = [other for other in missing if self._is_lost(other)]
            if self.layout.num_workers - len(gone) < self.layout.needed:
                raise PeerLostError(
                    f"{listed(gone)} was lost or has ended, and worker {worker} waits for its gradient in step "
                    f"{label + 1}, which needs {self.layout.needed} of {self.layout.num_workers} gradients. Every rank "
                    "makes the same number of steps",
                    ranks=gone,
                )
            self._wait(deadline, worker, missing, f"needs for step {label + 1}")

    # Servers

    def promote(self) -> None:
        """Go on as the server of this segment with what the other one has passed on.

        The workers have some seconds to come, and are waited for until then.
        """
        with contextlib.ExitStack() as stack:
            for each in self.shards:  # what the other server has sent before is applied, and nothing after
                stack.enter_context(each.lock)
            self._is_promoted = True
        with self._turn:
            self._step = min((each.version for each in self.shards), default=0) if self.layout.needed else 0
            now = time.monotonic()
            for worker, member in enumerate(self._members):
                numbers = [int(each.contents.numbers[worker]) for each in self.shards]
                self._pushed[worker] = min(numbers, default=0)
                if member == WorkerState.ABSENT:
                    self._members[worker] = WorkerState.ACTIVE
                    self._gone_since[worker] = now + _TAKEOVER_GRACE_SEC - _GRACE_SEC

    def depose(self) -> None:
        """Let all who wait here, now or later, get DeposedError."""
        with self._turn:
            self._is_deposed = True
            self._turn.notify_all()

    def fill(self, index: int, arrays: Sequence[Array]) -> None:
        """Replace the contents of a shard; see `SegmentShard.arrays`."""
        each = self.shards[index]
        with each.lock:
            for own, array in zip(each.arrays, arrays, strict=True):
                own[:] = array
            if self.replica is not None:
                self.replica.fill(index, arrays)

    # Parts

    def _advance(self, worker: int, finished: int) -> None:
        for _ in range(finished - self._finished[worker]):
            self._clocks.finish_step(worker)
        self._finished[worker] = max(finished, self._finished[worker])

    def _apply(
        self,
        index: int,
        pushes: Sequence[tuple[int, int]],
        change: Array,
        rules: Sequence[Rule],
        present: Sequence[bool],
        factor: float,
    ) -> None:
        """Apply a change to a shard, whose lock the caller holds."""
        each = self.shards[index]
        contents = each.contents
        apply_change(each.shard, contents, contents, change, rules, present, factor, self._scratch(contents.values))
        for worker, number in pushes:
            contents.numbers[worker] = number
        if self.layout.log_length:
            each.log += pushes
            del each.log[: -self.layout.log_length]
        each.version += 1
        if self.replica is not None:
            self.replica.submit(index, each.version, pushes, change, rules, present, factor)

    def _scratch(self, values: Array) -> tuple[Array, Array]:
        """Return memory of this thread for intermediate results."""
        found: dict[str, tuple[Array, Array]] = self._local.__dict__.setdefault("scratch", {})
        name = values.dtype.name
        if name not in found:
            count = self._largest[name]
            found[name] = np.empty(count, values.dtype), np.empty(count, values.dtype)
        return found[name]

    def _scratch_arrays(self) -> list[Array]:
        """Return memory for a gradient that is dropped."""
        return [self._scratch(each.contents.values)[0][: each.shard.count] for each in self.shards]

    def _is_lost(self, worker: int) -> bool:
        if self._members[worker] != WorkerState.ACTIVE:
            return self._members[worker] == WorkerState.LEFT
        since = self._gone_since.get(worker)
        return since is not None and time.monotonic() - since > _GRACE_SEC

    def _wait(self, deadline: float, worker: int, workers: Sequence[int], relation: str) -> None:
        """Wait for a change of the clocks or the step, for a moment."""
        if self._is_deposed:
            raise DeposedError("another server has this segment now")
        if time.monotonic() > deadline:
            raise self._stalled(worker, workers, relation)
        self._turn.wait(_LOOK_SEC)

    def _stalled(self, worker: int, workers: Sequence[int], relation: str) -> StalledError:
        now = time.monotonic()
        states = "; ".join(
            f"worker {other} has made {self._clock_numbers[other]} steps, the last {now - self._times[other]:.0f} s ago"
            for other in workers
        )
        return StalledError(
            f"worker {worker} has made {self._clock_numbers[worker]} steps and waited in vain for {listed(workers)}, "
            f"which it {relation}: {states}. Every rank makes the same number of steps",
            ranks=workers,
        )
