"""Compression to 16 bits: each rank rounds its gradients, the engine adds them up, the sum is widened again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from typing_extensions import override

from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import Communicator, Work
from unidist.framework import Framework
from unidist.gradients.compression import Bucket, BucketCompressor, GradientCompressor


@dataclass(frozen=True)
class _HalfPrecision(GradientCompressor):
    """Floating-point gradients of more than 16 bits travel in 16; others travel as they are."""

    wire: ClassVar[DType]

    @override
    def attach(self, bucket: Bucket) -> BucketCompressor | None:
        if not bucket.memory.dtype.is_floating or bucket.memory.dtype.itemsize <= self.wire.itemsize:
            return None
        return _HalfBucket(bucket, self.wire)


@dataclass(frozen=True)
class Float16(_HalfPrecision):
    """float16: 11 significant bits, infinite beyond 65504 (`gradient_predivide_factor` keeps sums below it)."""

    name: ClassVar[str] = "fp16"
    wire: ClassVar[DType] = DType.FLOAT16


@dataclass(frozen=True)
class BFloat16(_HalfPrecision):
    """bfloat16: 8 significant bits, the range of float32."""

    name: ClassVar[str] = "bf16"
    wire: ClassVar[DType] = DType.BFLOAT16


class _HalfBucket(BucketCompressor):
    def __init__(self, bucket: Bucket, wire: DType) -> None:
        self._memory = bucket.memory
        self._communicator: Communicator = bucket.communicator
        self._framework: Framework = bucket.framework
        self._narrow: Buffer
        if bucket.memory.memory == HOST:
            self._narrow = bucket.communicator.allocate(bucket.memory.count * wire.itemsize).cast(wire)
        else:
            self._narrow = bucket.framework.allocate(bucket.memory.count, wire, bucket.memory.memory)

    @override
    def allreduce(self, scale: float) -> Work:
        self._framework.convert(self._memory, self._narrow)
        return _Widening(self, self._communicator.allreduce(self._narrow, self._narrow, scale=scale))

    def widen(self) -> None:
        """Bring the sum back to the bucket."""
        self._framework.convert(self._narrow, self._memory)


class _Widening(Work):
    def __init__(self, bucket: _HalfBucket, inner: Work) -> None:
        self._bucket: _HalfBucket | None = bucket
        self._inner = inner

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        self._inner.wait(timeout)
        if self._bucket is not None:
            self._bucket.widen()
            self._bucket = None

    @override
    def done(self) -> bool:
        return self._inner.done()
