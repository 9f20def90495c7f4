"""What a script may pass as `compression=`: names, unidist's compressors, and Horovod-style ones for single tensors."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Protocol, cast

import torch

from unidist.communicator import Work
from unidist.compression import Bucket, BucketCompressor, GradientCompressor
from unidist.compressors.half import BFloat16, Float16
from unidist.errors import UsageError
from unidist.horovod_arguments import bucket_compressor
from unidist.registry import CompressorSpec, Registry
from unidist_torch.compression import BF16Compressor, FP16Compressor, NoneCompressor
from unidist_torch.memory import buffer_of, tensor_of


class TensorCompressor(Protocol):
    """Horovod's interface: a class or an object with these two."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what is added up instead of `tensor`, and what `decompress` needs."""

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the result in the form of the original tensor."""


CompressionLike = str | GradientCompressor | TensorCompressor | type[Any]
"""A name with options ("powersgd/rank=2"), a compressor of unidist, or one of Horovod's kind."""

_OWN: dict[Any, GradientCompressor | None] = {
    NoneCompressor: None,
    FP16Compressor: Float16(),
    BF16Compressor: BFloat16(),
}


def compressor_of(compression: CompressionLike, registry: Registry[CompressorSpec]) -> GradientCompressor | None:
    """Return the compressor; None for `Compression.none`, which leaves it to the strategy.

    Raises:
        ConfigurationError: an unknown name.
        ValueError: something that is no compressor.
    """
    return bucket_compressor(compression, registry, members=_OWN, otherwise=_per_tensor)


def _per_tensor(compression: Any) -> GradientCompressor:
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ValueError(
            f"compression={compression!r} has no compress and decompress; give a member of Compression, the name of a "
            "compressor, or a class like Horovod's Compressor"
        )
    return PerTensor(compression)


def tensor_compressor(compression: CompressionLike) -> TensorCompressor:
    """Return a compressor of single tensors, for what is not exchanged in buckets.

    Raises:
        UsageError: one of buckets.
    """
    if isinstance(compression, str | GradientCompressor):
        raise UsageError(
            f"compression={compression!r} compresses buckets of gradients, but op=Adasum exchanges single tensors; "
            "use a member of Compression, or a class like Horovod's Compressor"
        )
    return cast(TensorCompressor, compression)


@dataclass(frozen=True)
class PerTensor(GradientCompressor):
    """Compresses each gradient by a compressor of Horovod's kind. Tensors are added up in their compressed form.

    Args:
        compressor: its `compress` gives tensors of equal shape and dtype on every rank.
    """

    name: ClassVar[str] = "per-tensor"

    compressor: Any

    def attach(self, bucket: Bucket) -> BucketCompressor | None:
        """See `GradientCompressor.attach`."""
        return _PerTensorBucket(bucket, self.compressor)

    def __repr__(self) -> str:
        kind = self.compressor if isinstance(self.compressor, type) else type(self.compressor)
        return f"PerTensor({kind.__module__}.{kind.__qualname__})"


class _PerTensorBucket(BucketCompressor):
    def __init__(self, bucket: Bucket, compressor: TensorCompressor) -> None:
        self._compressor = compressor
        self._communicator = bucket.communicator
        self._gradients = [
            tensor_of(bucket.memory.slice(slot.offset, slot.count), parameter.shape)
            for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True)
        ]
        self.num_operations = len(self._gradients)

    def allreduce(self, scale: float) -> Work:
        """See `BucketCompressor.allreduce`."""
        parts = []
        for gradient in self._gradients:
            compressed, ctx = self._compressor.compress(gradient)
            wire = compressed.detach().contiguous()
            buffer = buffer_of(wire)
            parts.append((gradient, wire, ctx, self._communicator.allreduce(buffer, buffer, scale=scale)))
        return _Decompression(self._compressor, parts)


class _Decompression(Work):
    def __init__(self, compressor: TensorCompressor, parts: list[tuple[torch.Tensor, torch.Tensor, Any, Work]]) -> None:
        self._compressor = compressor
        self._parts = parts

    def wait(self, timeout: timedelta | None = None) -> None:
        """See `Work.wait`."""
        while self._parts:
            gradient, wire, ctx, work = self._parts[0]
            work.wait(timeout)
            self._parts.pop(0)
            with torch.no_grad():
                gradient.copy_(self._compressor.decompress(wire, ctx))

    def done(self) -> bool:
        """See `Work.done`."""
        return all(work.done() for _, _, _, work in self._parts)
