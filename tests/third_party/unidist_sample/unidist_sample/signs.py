"""The compressor `sample-signs`: of each gradient travels its sign, and of each bucket one magnitude.

A quarter of the bytes, and a crude approximation: the sum of the signs times the mean magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import Work
from unidist.errors import ConfigurationError
from unidist.gradients.compression import Bucket, BucketCompressor, GradientCompressor

_MAX_RANKS = 127  # their signs are added up in one byte


@dataclass(frozen=True)
class Signs(GradientCompressor):
    """Compresses float32 gradients in host memory; others travel as they are.

    Args:
        gain: factor for the magnitude.
    """

    name: ClassVar[str] = "sample-signs"

    gain: float = 1.0

    def attach(self, bucket: Bucket) -> BucketCompressor | None:
        """See `GradientCompressor.attach`."""
        if bucket.communicator.size > _MAX_RANKS:
            raise ConfigurationError(
                f"{self.name} adds up the signs of at most {_MAX_RANKS} ranks, not {bucket.communicator.size}; use fp16"
            )
        if bucket.memory.memory != HOST or bucket.memory.dtype is not DType.FLOAT32:
            return None
        return _SignsOfBucket(bucket, self.gain)


class _SignsOfBucket(BucketCompressor):
    num_operations = 2

    def __init__(self, bucket: Bucket, gain: float) -> None:
        self._bucket = bucket
        self._gain = gain
        self._signs = bucket.communicator.allocate(bucket.memory.count).cast(DType.INT8)
        self._magnitude = Buffer.allocate(1, DType.FLOAT32)

    def allreduce(self, scale: float) -> Work:
        """See `BucketCompressor.allreduce`."""
        import numpy as np

        values = np.frombuffer(self._bucket.memory.bytes(), np.float32)
        with np.errstate(invalid="ignore"):  # of a number that is not finite; then the magnitude is not finite either
            np.frombuffer(self._signs.bytes(), np.int8)[:] = np.sign(values)
        np.frombuffer(self._magnitude.bytes(), np.float32)[:] = np.abs(values).mean() * self._gain
        communicator = self._bucket.communicator
        works = [
            communicator.allreduce(self._signs, self._signs),
            communicator.allreduce(self._magnitude, self._magnitude, scale=scale / communicator.size),
        ]
        return _Unpacking(self, works)

    def unpack(self) -> None:
        """Put the result into the bucket."""
        import numpy as np

        signs = np.frombuffer(self._signs.bytes(), np.int8)
        magnitude = np.frombuffer(self._magnitude.bytes(), np.float32)
        with np.errstate(invalid="ignore"):  # zero times infinity, which is not finite either
            np.multiply(signs, magnitude, out=np.frombuffer(self._bucket.memory.bytes(), np.float32))


class _Unpacking(Work):
    def __init__(self, bucket: _SignsOfBucket, works: list[Work]) -> None:
        self._bucket: _SignsOfBucket | None = bucket
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> None:
        """See `Work.wait`."""
        for work in self._works:
            work.wait(timeout)
        if self._bucket is not None:
            self._bucket.unpack()
            self._bucket = None

    def done(self) -> bool:
        """See `Work.done`."""
        return all(work.done() for work in self._works)
