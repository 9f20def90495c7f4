"""Exchange of gradients by reduce-scatter: each rank ends up with its shard of their sum.

Stage 1 keeps every bucket and reduces a window of several backward passes once; this rank's shard is the bucket's own
piece. Stages 2 and 3 keep the shards only: a bucket has memory while it is filled and reduced, so each pass of a window
is reduced by itself and the shards are added up, which costs as much traffic as an update after every pass.

Several backward passes before a step are reduced one by one at every stage; gradients that are only accumulated
(`no_sync`) stay whole in their buckets, also at stages 2 and 3, until the next pass is reduced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import override

from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import Communicator, ReduceOp, Work
from unidist.errors import ExtraPassError, UsageError
from unidist.gradients.allreduce import PATIENCE_SEC
from unidist.gradients.buckets import ParameterInfo, Slot
from unidist.gradients.interface import (
    NO_NOTICE,
    NOTICE_BYTES,
    GradientExchange,
    ReducedGradients,
    RoundResult,
)
from unidist.gradients.pieces import GradientPiece
from unidist.gradients.precision import is_narrow
from unidist.timeline import Recorder
from unidist_zero.sharding.bucket_buffers import BucketBuffers
from unidist_zero.sharding.partition import Partition, ShardedBucket
from unidist_zero.sharding.shard_groups import ShardGroup, allocate

if TYPE_CHECKING:
    from unidist.framework import Framework
    from unidist.gradients.precision import Precision

_POLL_SEC = 50e-6


@dataclass
class _Bucket:
    number: int
    cut: ShardedBucket
    shard_group: ShardGroup
    count: int  # elements of this rank's shard
    shard: Buffer | None = None  # where the result goes; at stages 2 and 3 from the first operation on
    memory: Buffer | None = None
    pooled: Buffer | None = None  # what `memory` is part of, to be given back
    waiting: int = 0  # gradients that are not ready yet
    missing: set[int] = field(default_factory=set)
    work: Work | None = None
    target: Buffer | None = None  # of the work
    result: Buffer | None = None  # where the result of this pass goes: the shard, or beside it
    wide: Buffer | None = None  # pooled memory in which it is added up, where that is another type
    scale: float = 1.0
    crosses: bool = False  # the work is the one between replicas
    posted_ns: int = 0
    kept: Buffer | None = None  # at stage 1, whose shard is overwritten by the next pass: the sum of earlier passes


class ReduceScatterExchange(GradientExchange):
    """Leaves each rank its shard of the sums, bucket by bucket.

    As in `AllReduceExchange`, buckets are posted in the same order on every rank as they become ready, the last one in
    `finish`, together with one byte per parameter that tells whether any rank has a gradient for it.

    Args:
        parameters: in registration order, equal on every rank.
        partition: of the buckets of these parameters.
        framework: provides and clears memory.
        shard_groups: by kind of memory; closed with this object.
        everyone: over all ranks of the data axis, host memory; closed with this object. May be that of a shard group.
        keeps_buckets: stage 1; False: stages 2 and 3.
        recorder: takes one event per bucket and round.
        precision: says in which type 16-bit gradients are added up (`reduce_dtype`); None: in their own. With another
            type they are copied to memory of that type, a few buckets at a time, and the sum is rounded once.

    Attributes:
        partition: of the buckets.
        shard_groups: by kind of memory.
        everyone: over all ranks of the data axis.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        partition: Partition,
        *,
        framework: Framework,
        shard_groups: Mapping[str, ShardGroup],
        everyone: Communicator,
        keeps_buckets: bool,
        recorder: Recorder | None = None,
        precision: Precision | None = None,
    ) -> None:
        self._precision = precision
        self.parameters = tuple(parameters)
        self.partition = partition
        self.shard_groups = dict(shard_groups)
        self.everyone = everyone
        self.buffers_move = self.reduces_each_pass = not keeps_buckets
        self.adds_passes = True
        self._framework = framework
        self._recorder = recorder or Recorder()
        self._pools = {kind: BucketBuffers(self._allocator(kind)) for kind in self.shard_groups}
        self._wide_pools = {kind: BucketBuffers(self._allocator(kind)) for kind in self.shard_groups}
        self._buckets = [self._make_bucket(number, cut, keeps_buckets) for number, cut in enumerate(partition.buckets)]
        self._in_order = list(self._buckets)
        self._place: dict[int, tuple[_Bucket, Slot]] = {
            slot.parameter: (bucket, slot) for bucket in self._buckets for slot in bucket.cut.slots
        }
        self._status = everyone.allocate(len(self.parameters) + NOTICE_BYTES)
        self._status_bytes = self._status.bytes()
        self._num_passes = 0  # of this window, whose sums are in the shards
        self._next_scale: float | None = None
        self._in_round = False
        self._start_pass()
        self._clear_status()

    @override
    def buffer(self, index: int) -> Buffer:
        """See `GradientExchange.buffer`. At stages 2 and 3 it gives the parameter's bucket memory, for this pass."""
        bucket, slot = self._place[index]
        return self._memory(bucket).slice(slot.offset, slot.count)

    def post_in_order(self, numbers: Sequence[int]) -> None:
        """Exchange the buckets in this order of their numbers from now on, the same on every rank. Between two rounds.

        For gradients that become ready in another order than that of the parameters.
        """
        assert not self._in_round, "the order is changed between two rounds"
        assert sorted(numbers) == list(range(len(self._buckets))), "each bucket once"
        self._in_order = [self._buckets[number] for number in numbers]

    def shard(self, number: int) -> Buffer:
        """Return the memory that holds this rank's shard of bucket `number` after `finish`.

        It stays the same until `release_shards`.
        """
        return self._shard(self._buckets[number])

    def release_shards(self) -> None:
        """Free the shards at stages 2 and 3, between two windows: nobody needs this rank's gradients any more."""
        if self.buffers_move:
            for bucket in self._buckets:
                bucket.shard = None

    @property
    @override
    def in_round(self) -> bool:
        return self._in_round

    @override
    def accumulate(self, index: int) -> None:
        self._in_round = True
        self._status_bytes[index] = 1
        self._touched.add(index)

    @override
    def ready(self, index: int) -> None:
        bucket, _ = self._place[index]
        if index not in bucket.missing:
            raise ExtraPassError(
                f"the gradient of {self.parameters[index].name!r} became ready twice before the update. One backward "
                "pass per step is exchanged; for several use the strategy accumulate=N beside zero."
            )
        self.accumulate(index)
        self._is_exchanged = True
        bucket.missing.discard(index)
        bucket.waiting -= 1
        while self._posted < len(self._buckets) - 1 and self._in_order[self._posted].waiting == 0:
            bucket = self._in_order[self._posted]
            if not self._has_room(bucket.shard_group.communicator.capabilities.num_pending):
                return
            self._post(bucket, self.scale)

    @override
    def holds(self, index: int) -> bool:
        return index in self._touched

    @override
    def was_ready(self, index: int) -> bool:
        return index not in self._place[index][0].missing

    @override
    def rescale(self, scale: float) -> None:
        if self._is_exchanged:  # by `end_pass`, when the next one has begun
            self._next_scale = scale
        else:
            self._multiply_sums(scale / self.scale)
            self.scale = scale

    def _multiply_sums(self, factor: float) -> None:
        """Multiply the sums of earlier passes of this window."""
        if not self._num_passes or factor == 1.0:
            return
        for bucket in self._buckets:
            self._framework.multiply(self._shard(bucket) if bucket.kept is None else bucket.kept, factor)

    @override
    def end_pass(self) -> None:
        self._complete(self.scale)
        if not self.buffers_move:
            for bucket in self._buckets:
                self._keep(bucket)
        self._num_passes += 1
        self._start_pass()
        if self._next_scale is not None:
            scale, self._next_scale = self._next_scale, None
            self.rescale(scale)

    def _keep(self, bucket: _Bucket) -> None:
        """Add the result of a pass at stage 1 to those of earlier ones."""
        if bucket.kept is None:
            bucket.kept = self.allocate(bucket.count, bucket.cut)
        elif not self._num_passes:
            self._framework.zero(bucket.kept)
        self._framework.add(self._shard(bucket), bucket.kept)

    @override
    def finish(self, *, scale: float | None = None, notice: bytes = NO_NOTICE) -> RoundResult:
        """See `GradientExchange.finish`: every shard holds `scale` times this rank's piece of the sum."""
        factor = self.scale if scale is None else scale
        if self._posted and factor != self.scale:
            raise UsageError(f"scale {factor} differs from {self.scale}, with which buckets were exchanged already")
        if factor != self.scale:  # of a window that ends early
            self._multiply_sums(factor / self.scale)
        self._status_bytes[-NOTICE_BYTES:] = notice
        self._complete(factor)
        if self._num_passes:
            for bucket in self._buckets:
                if bucket.kept is not None:
                    self._framework.add(bucket.kept, self._shard(bucket))
        self._recorder.wait(self.everyone.allreduce(self._status, self._status, op=ReduceOp.MAX))
        values = self._status_bytes.tolist()
        self._num_passes = 0
        self._next_scale = None
        self._in_round = False
        self._start_pass()
        self._clear_status()
        return RoundResult(tuple(value > 0 for value in values[:-NOTICE_BYTES]), bytes(values[-NOTICE_BYTES:]))

    @override
    def reduced(self) -> ReducedGradients:
        """See `GradientExchange.reduced`: this rank's shards. Those of 16 bits are multiplied when they are widened."""
        shards = tuple(self._shard(bucket) for bucket in self._buckets)
        divided_over = self.shard_groups[HOST].communicator
        deferred = any(is_narrow(bucket.cut.dtype) for bucket in self._buckets)
        return ReducedGradients(
            shards,
            divided_over if divided_over.size > 1 else None,
            copies=tuple(self.parameters[bucket.cut.slots[0].parameter].copies for bucket in self._buckets),
            deferred=deferred,
        )

    @override
    def pieces(self) -> list[GradientPiece]:
        owner = self.shard_groups[HOST].communicator.rank
        found = []
        for piece in self.partition.pieces(owner):
            bucket = self._buckets[piece.bucket]
            memory = self._shard(bucket).slice(piece.offset - bucket.cut.begin(owner), piece.count)
            found.append(GradientPiece(piece.parameter, self.parameters[piece.parameter], piece.start, memory))
        return found

    @override
    def close(self) -> None:
        self._buckets.clear()
        self._in_order.clear()
        self._place.clear()
        for pool in (*self._pools.values(), *self._wide_pools.values()):
            pool.clear()
        for shard_group in self.shard_groups.values():
            shard_group.close()
        self.everyone.close()

    # Memory

    def allocate(self, count: int, cut: ShardedBucket) -> Buffer:
        """Return zeroed memory that moves without a copy, for elements of a bucket: its shard, new parameters."""
        return self._allocator(cut.memory)(count * cut.dtype.itemsize).cast(cut.dtype)

    def _allocator(self, kind: str) -> Callable[[int], Buffer]:
        return partial(allocate, self._framework, self.shard_groups[kind].communicator, kind)

    def _make_bucket(self, number: int, cut: ShardedBucket, keeps_buckets: bool) -> _Bucket:
        shard_group = self.shard_groups[cut.memory]
        count = cut.counts[shard_group.communicator.rank]
        if not keeps_buckets:
            return _Bucket(number, cut, shard_group, count)
        memory = self.allocate(cut.count, cut)
        shard = memory.slice(cut.begin(shard_group.communicator.rank), count)
        return _Bucket(number, cut, shard_group, count, shard, memory)

    def _shard(self, bucket: _Bucket) -> Buffer:
        """Return the memory of this rank's shard; at stages 2 and 3 it is made when it is first needed.

        In ordinary memory, as ranks write to their own shards only, and taking it and giving it back is quick there;
        but not for replicas, which reduce the shards once more in place.
        """
        if bucket.shard is None:
            if bucket.shard_group.replicas is not None:
                bucket.shard = self.allocate(bucket.count, bucket.cut)
            else:
                bucket.shard = self._framework.allocate(bucket.count, bucket.cut.dtype, bucket.cut.memory)
        return bucket.shard

    def _memory(self, bucket: _Bucket) -> Buffer:
        """Return the bucket's memory; at stages 2 and 3 a bucket that has none gets some, with clean gaps."""
        if bucket.memory is None:
            pool = self._pools[bucket.cut.memory]
            self._finish_oldest(lambda: pool.exhausted)
            pooled, memory = pool.acquire(bucket.cut.count * bucket.cut.dtype.itemsize)
            bucket.pooled, bucket.memory = pooled, memory.cast(bucket.cut.dtype)
            for offset, count in bucket.cut.gaps:
                self._framework.zero(bucket.memory.slice(offset, count))
        return bucket.memory

    def _has_room(self, limit: int | None) -> bool:
        """Return whether another bucket may be in flight; wait for that."""
        return limit is None or self._finish_oldest(lambda: self._posted - self._completed >= limit)

    def _finish_oldest(self, is_full: Callable[[], bool]) -> bool:
        """Wait for buckets in flight to be reduced, the oldest first, while `is_full`; but not for ever.

        A rank that has joined takes part only when an update is announced, which is after this pass. Then more memory
        must be allocated instead, or buckets must wait for the end of the pass.

        Returns:
            Whether it is full no longer.
        """
        while is_full():
            if self._completed == self._posted:
                return False
            oldest = self._in_order[self._completed]
            if oldest.shard_group.communicator.capabilities.waits_in_queue:  # nobody waits here
                self._finish_next()
                continue
            if self._advance(oldest, wait=False):
                self._completed += 1
                continue
            if self._patience_sec <= 0:
                return False
            time.sleep(_POLL_SEC)
            self._patience_sec -= _POLL_SEC
        return True

    # A pass

    def _start_pass(self) -> None:
        for bucket in self._buckets:
            bucket.work = bucket.target = bucket.result = None
            bucket.crosses = False
            bucket.missing = {slot.parameter for slot in bucket.cut.slots}
            bucket.waiting = len(bucket.missing)
        self._touched: set[int] = set()
        self._is_exchanged = False  # gradients of this pass were `ready`
        self._posted = self._completed = 0
        self._patience_sec = PATIENCE_SEC

    def _clear_status(self) -> None:
        for i in range(len(self._status_bytes)):
            self._status_bytes[i] = 0

    def _complete(self, scale: float) -> None:
        """Post all remaining buckets, and wait for all. Collective."""
        while self._posted < len(self._buckets):
            self._post(self._in_order[self._posted], scale)
            if self.buffers_move:  # without this all buckets that had no gradient here would have memory at once
                while self._posted - self._completed >= 2:
                    self._finish_next()
        for bucket in self._in_order[self._completed :]:
            self._start_crossing(bucket)
        while self._completed < len(self._buckets):
            self._finish_next()

    def _finish_next(self) -> None:
        self._advance(self._in_order[self._completed], wait=True)
        self._completed += 1

    def _post(self, bucket: _Bucket, scale: float) -> None:
        memory = self._memory(bucket)
        for slot in bucket.cut.slots:
            if slot.parameter not in self._touched:
                self._framework.zero(memory.slice(slot.offset, slot.count))
        shard = bucket.shard_group.communicator
        bucket.scale = scale
        bucket.result = bucket.target = own = self._shard(bucket)
        if self._num_passes and self.buffers_move:
            # The shard holds a sum already: the new one goes to this rank's piece of the bucket.
            bucket.result = bucket.target = memory.slice(bucket.cut.begin(shard.rank), own.count)
        dtype = bucket.cut.dtype
        wanted = dtype if self._precision is None else self._precision.reduce_dtype(dtype)
        if wanted is not dtype:
            memory = self._widened(bucket, memory, wanted)
            bucket.target = memory.slice(bucket.cut.begin(shard.rank), own.count)
        factor = scale if bucket.shard_group.replicas is None else 1.0
        bucket.work = shard.reducescatter(memory, bucket.target, scale=factor, counts=bucket.cut.counts)
        self._in_round = True
        self._posted += 1
        bucket.posted_ns = time.monotonic_ns() if self._recorder.timeline is not None else 0

    def _widened(self, bucket: _Bucket, memory: Buffer, dtype: DType) -> Buffer:
        """Return a copy of the bucket's gradients in the type that they are added up in."""
        pool = self._wide_pools[bucket.cut.memory]
        self._finish_oldest(lambda: pool.exhausted)
        bucket.wide, pooled = pool.acquire(memory.count * dtype.itemsize)
        wide = pooled.cast(dtype)
        self._framework.convert(memory, wide)
        return wide

    def _advance(self, bucket: _Bucket, *, wait: bool) -> bool:
        """Bring a bucket's result into its shard; returns whether it has arrived. In the order of buckets."""
        assert bucket.work is not None
        if not (wait or bucket.work.done()):
            return False
        self._start_crossing(bucket)
        if not (wait or bucket.work.done()):
            return False
        self._recorder.wait(bucket.work)
        timeline = self._recorder.timeline
        if timeline is not None and bucket.posted_ns:
            stop = time.monotonic_ns()
            timeline.record("exchange", "REDUCESCATTER", bucket.posted_ns, stop, tensor=f"gradients {bucket.number}")
        assert bucket.target is not None
        assert bucket.result is not None
        if bucket.wide is not None:
            self._framework.convert(bucket.target, bucket.result)
            self._wide_pools[bucket.cut.memory].release(bucket.wide)
            bucket.wide = None
        if bucket.result is not bucket.shard:
            self._framework.add(bucket.result, self._shard(bucket))
        if bucket.pooled is not None:
            self._pools[bucket.cut.memory].release(bucket.pooled)
            bucket.pooled = bucket.memory = None
        return True

    def _start_crossing(self, bucket: _Bucket) -> None:
        """With replicas: once the shard is reduced within the group, sum it over the groups."""
        assert bucket.work is not None
        if bucket.shard_group.replicas is None or bucket.crosses:
            return
        self._recorder.wait(bucket.work)
        assert bucket.target is not None
        bucket.work = bucket.shard_group.replicas.allreduce(bucket.target, bucket.target, scale=bucket.scale)
        bucket.crosses = True
