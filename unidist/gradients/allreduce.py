"""All-reduce of gradients in buckets, which are reduced as they become ready, always in the same order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from typing_extensions import override

from unidist.buffer import HOST, Buffer
from unidist.communicator import Communicator, ReduceOp, Work
from unidist.errors import ExtraPassError, UsageError
from unidist.gradients.buckets import BucketLayout, ParameterInfo, plan_buckets
from unidist.gradients.compression import Bucket, BucketCompressor
from unidist.gradients.interface import (
    NO_NOTICE,
    NOTICE_BYTES,
    GradientExchange,
    ReducedGradients,
    RoundResult,
)
from unidist.gradients.options import ExchangeOptions
from unidist.timeline import Recorder

if TYPE_CHECKING:
    from unidist.framework import Framework


PATIENCE_SEC = 1.0
"""How long a round waits, all in all, for buckets under way before `finish`: a joined peer takes part only when it is
told to, which happens later."""


@dataclass
class _Bucket:
    layout: BucketLayout
    memory: Buffer
    places: dict[int, Buffer]  # of each parameter, in `memory`
    waiting: int  # gradients that are not ready yet
    communicator: Communicator
    other: tuple[Buffer, dict[int, Buffer]] | None = None  # memory and places that `switch_memory` returns to
    compression: BucketCompressor | None = None
    work: Work | None = None
    posted_ns: int = 0
    missing: set[int] = field(default_factory=set)
    num_operations: int = 1  # collectives that its exchange posts


class AllReduceExchange(GradientExchange):
    """Sums gradients by all-reduce, bucket by bucket.

    The last bucket is exchanged in `finish`, together with one byte per parameter that says whether any rank has a
    gradient for it (reduced by MAX). So every rank exchanges the same buckets in the same order, even if gradients are
    missing on some ranks.

    Args:
        parameters: in registration order, equal on every rank.
        framework: allocates device memory for gradients that are not in host memory.
        host: communicator for host memory, used by nothing else; closed with this object.
        device: the same for device memory, if needed.
        bucket_bytes: see `plan_buckets`; default: what suits the engine.
        overlap: exchange buckets as they become ready; False exchanges all of them in `finish`.
        recorder: records one event per bucket and round, from the start of its exchange to its end.
        options: compression and predivision; its process set is the caller's concern. With a single rank nothing is
            sent, and nothing is compressed.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        *,
        framework: Framework,
        host: Communicator,
        device: Communicator | None = None,
        bucket_bytes: int | None = None,
        overlap: bool = True,
        recorder: Recorder | None = None,
        options: ExchangeOptions | None = None,
    ) -> None:
        self._options = options or ExchangeOptions()
        self.parameters = tuple(parameters)
        self._framework = framework
        self._host = host
        self._device = device
        self._overlap = overlap
        self._recorder = recorder or Recorder()
        self.bucket_bytes = bucket_bytes or (device or host).capabilities.bucket_bytes
        layouts = plan_buckets(self.parameters, bucket_bytes=self.bucket_bytes)
        self._buckets = [self._make_bucket(layout) for layout in layouts]
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.places}
        self.has_other_memory = all(bucket.compression is None for bucket in self._buckets)  # compressors know one
        self._status = host.allocate(len(self.parameters) + NOTICE_BYTES)
        self._status_bytes = self._status.bytes()
        self._in_round = False
        self._reset()

    @override
    def buffer(self, index: int) -> Buffer:
        return self._bucket_of[index].places[index]

    @override
    def early_bucket(self, index: int) -> int | None:
        number = next(at for at, bucket in enumerate(self._buckets) if bucket is self._bucket_of[index])
        return number if self._overlap and number + 1 < len(self._buckets) else None

    @override
    def switch_memory(self) -> None:
        assert self.has_other_memory
        assert not self._in_round
        for bucket in self._buckets:
            before = bucket.memory, bucket.places
            bucket.memory, bucket.places = bucket.other or self._allocate(bucket.layout)
            bucket.other = before

    @property
    @override
    def in_round(self) -> bool:
        return self._in_round

    @override
    def accumulate(self, index: int) -> None:
        self._in_round = True
        self._status_bytes[index] = 1

    @override
    def ready(self, index: int) -> None:
        if not self._overlap:
            self.accumulate(index)
            return
        bucket = self._bucket_of[index]
        if index not in bucket.missing:
            raise ExtraPassError(
                f"the gradient of {self.parameters[index].name!r} became ready twice before the update. One "
                "backward pass per step is exchanged; for several use the strategy accumulate=N (Horovod: "
                "backward_passes_per_step=N), or data:overlap=false, which exchanges once, at the step."
            )
        self._in_round = True
        self._status_bytes[index] = 1
        bucket.missing.discard(index)
        bucket.waiting -= 1
        if bucket.waiting == 0:
            self._post_early()

    @override
    def finish(self, *, scale: float | None = None, notice: bytes = NO_NOTICE) -> RoundResult:
        factor = self.scale if scale is None else scale
        if self._posted and factor != self.scale:
            raise UsageError(f"scale {factor} differs from {self.scale}, with which buckets were exchanged already")
        self._in_round = True
        while self._posted < len(self._buckets):
            self._post(self._buckets[self._posted], factor)
        self._status_bytes[-NOTICE_BYTES:] = notice
        timeline = self._recorder.timeline
        status = self._host.allreduce(self._status, self._status, op=ReduceOp.MAX)
        for number, bucket in enumerate(self._buckets):
            assert bucket.work is not None
            self._recorder.wait(bucket.work)
            if timeline is not None and bucket.posted_ns:
                stop = time.monotonic_ns()
                timeline.record("exchange", "ALLREDUCE", bucket.posted_ns, stop, tensor=f"gradients {number}")
        self._recorder.wait(status)
        values = self._status_bytes.tolist()
        self._reset()
        return RoundResult(tuple(value > 0 for value in values[:-NOTICE_BYTES]), bytes(values[-NOTICE_BYTES:]))

    @override
    def reduced(self) -> ReducedGradients:
        """Return the memory of all buckets."""
        return ReducedGradients(
            tuple(bucket.memory for bucket in self._buckets),
            copies=tuple(bucket.layout.copies for bucket in self._buckets),
        )

    @override
    def close(self) -> None:
        for bucket in self._buckets:
            if bucket.compression is not None:
                bucket.compression.close()
        self._buckets.clear()
        self._bucket_of.clear()
        self._host.close()
        if self._device is not None:
            self._device.close()

    def _make_bucket(self, layout: BucketLayout) -> _Bucket:
        memory, places = self._allocate(layout)
        bucket = _Bucket(layout, memory, places, len(layout.slots), self._communicator(layout))
        bucket.compression = self._compression(bucket)
        if bucket.compression is not None:
            bucket.num_operations = bucket.compression.num_operations
        return bucket

    def _allocate(self, layout: BucketLayout) -> tuple[Buffer, dict[int, Buffer]]:
        """Return memory for a bucket, and the place of each parameter in it."""
        nbytes = layout.count * layout.dtype.itemsize
        if layout.memory == HOST:
            memory = self._host.allocate(nbytes).cast(layout.dtype)
        else:
            memory = self._framework.allocate(layout.count, layout.dtype, layout.memory)
        return memory, {slot.parameter: memory.slice(slot.offset, slot.count) for slot in layout.slots}

    def _compression(self, bucket: _Bucket) -> BucketCompressor | None:
        if self._options.compressor is None or bucket.communicator.size == 1:
            return None
        parameters = tuple(self.parameters[slot.parameter] for slot in bucket.layout.slots)
        described = Bucket(bucket.layout, parameters, bucket.memory, bucket.communicator, self._framework)
        return self._options.compressor.attach(described)

    def _communicator(self, layout: BucketLayout) -> Communicator:
        if layout.memory == HOST:
            return self._host
        assert self._device is not None
        return self._device

    def _post_early(self) -> None:
        """Post the complete buckets whose turn it is, except the last, as many as the engine takes."""
        while self._posted < len(self._buckets) - 1 and self._buckets[self._posted].waiting == 0:
            bucket = self._buckets[self._posted]
            if not self._has_room(bucket):
                return
            self._post(bucket, self.scale)

    def _has_room(self, bucket: _Bucket) -> bool:
        """Return whether the engine takes a bucket; if it is full, wait for the oldest under way, but not for ever."""
        limit = bucket.communicator.capabilities.num_pending
        if limit is None:
            return True
        while self._num_pending + bucket.num_operations > limit:
            if self._num_done == self._posted:
                return False  # more operations than the engine takes at once
            oldest = self._buckets[self._num_done]
            assert oldest.work is not None
            if not oldest.work.done():
                if self._patience_sec <= 0 or oldest.compression is not None:  # which may go on in `wait` only
                    return False
                begin = time.monotonic()
                oldest.work.poll(timedelta(seconds=self._patience_sec))
                self._patience_sec -= time.monotonic() - begin
                continue
            self._num_done += 1
            self._num_pending -= oldest.num_operations
        return True

    def _post(self, bucket: _Bucket, scale: float) -> None:
        for index in bucket.missing:
            if not self._status_bytes[index]:
                self._framework.zero(bucket.places[index])
        factor = self._options.predivide_factor
        if factor != 1.0:
            self._framework.multiply(bucket.memory, 1.0 / factor)
        if bucket.compression is not None:
            bucket.work = bucket.compression.allreduce(scale * factor)
        else:
            bucket.work = bucket.communicator.allreduce(bucket.memory, bucket.memory, scale=scale * factor)
        self._posted += 1
        self._num_pending += bucket.num_operations
        bucket.posted_ns = time.monotonic_ns() if self._recorder.timeline is not None else 0

    def _reset(self) -> None:
        for bucket in self._buckets:
            bucket.work = None
            bucket.missing = {slot.parameter for slot in bucket.layout.slots}
            bucket.waiting = len(bucket.missing)
        for i in range(len(self._status_bytes)):
            self._status_bytes[i] = 0
        self._posted = self._num_done = self._num_pending = 0
        self._patience_sec = PATIENCE_SEC
        self._in_round = False
