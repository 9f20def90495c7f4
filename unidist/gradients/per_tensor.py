"""Compresses each gradient of a bucket by a compressor for single tensors, as Horovod's scripts have them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

from typing_extensions import override

from unidist.buffer import Buffer
from unidist.communicator import Work
from unidist.gradients.compression import Bucket, BucketCompressor, GradientCompressor


class TensorAccess(ABC):
    """Access to single gradients, which a framework provides for `PerTensor`."""

    @abstractmethod
    def view(self, memory: Buffer, shape: Sequence[int]) -> Any:
        """Return the framework's view of a gradient in its bucket; it holds whatever the memory holds."""

    @abstractmethod
    def compress(self, compressor: Any, gradient: Any) -> tuple[Any, Buffer, Any]:
        """Return the compressed gradient, its memory, to which the sum is written, and what `decompress` needs."""

    @abstractmethod
    def decompress(self, compressor: Any, gradient: Any, reduced: Any, ctx: Any) -> None:
        """Write what the compressor makes of the reduced compressed gradient into the view of the gradient."""


@dataclass(frozen=True)
class PerTensor(GradientCompressor):
    """Compresses each gradient by a compressor of Horovod's kind. Tensors are added up in their compressed form.

    Args:
        compressor: its `compress` gives tensors of equal shape and dtype on every rank.
        tensors: the framework's side.
    """

    name: ClassVar[str] = "per-tensor"

    compressor: Any
    tensors: TensorAccess = field(repr=False, compare=False)

    @classmethod
    def of(cls, compression: Any, tensors: TensorAccess) -> PerTensor:
        """Return the compressor for what a script passes as `compression=`; ValueError for what is none."""
        if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
            raise ValueError(
                f"compression={compression!r} has no compress and decompress; give a member of Compression, the name "
                "of a compressor, or a class like Horovod's Compressor"
            )
        return cls(compression, tensors)

    @override
    def attach(self, bucket: Bucket) -> BucketCompressor | None:
        return _PerTensorBucket(bucket, self.compressor, self.tensors)

    def __repr__(self) -> str:
        kind = self.compressor if isinstance(self.compressor, type) else type(self.compressor)
        return f"PerTensor({kind.__module__}.{kind.__qualname__})"


@dataclass(frozen=True)
class _Part:
    gradient: Any
    compressed: Any
    ctx: Any
    work: Work


class _PerTensorBucket(BucketCompressor):
    def __init__(self, bucket: Bucket, compressor: Any, tensors: TensorAccess) -> None:
        self._compressor = compressor
        self._tensors = tensors
        self._communicator = bucket.communicator
        self._gradients = [
            tensors.view(bucket.memory.slice(slot.offset, slot.count), parameter.shape)
            for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True)
        ]
        self.num_operations = len(self._gradients)

    @override
    def allreduce(self, scale: float) -> Work:
        parts = []
        for gradient in self._gradients:
            compressed, buffer, ctx = self._tensors.compress(self._compressor, gradient)
            parts.append(_Part(gradient, compressed, ctx, self._communicator.allreduce(buffer, buffer, scale=scale)))
        return _Decompression(self._compressor, self._tensors, parts)


class _Decompression(Work):
    def __init__(self, compressor: Any, tensors: TensorAccess, parts: list[_Part]) -> None:
        self._compressor = compressor
        self._tensors = tensors
        self._parts = parts

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        while self._parts:
            part = self._parts[0]
            part.work.wait(timeout)
            self._parts.pop(0)
            self._tensors.decompress(self._compressor, part.gradient, part.compressed, part.ctx)

    @override
    def done(self) -> bool:
        return all(part.work.done() for part in self._parts)
