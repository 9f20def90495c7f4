"""What a script may pass as `compression=`: names, unidist's compressors, and Horovod-style ones for single tensors."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import tensorflow as tf

from unidist.communicator import Work
from unidist.compression import Bucket, BucketCompressor, GradientCompressor
from unidist.compressors.half import BFloat16, Float16
from unidist.horovod_arguments import bucket_compressor
from unidist.registry import CompressorSpec, Registry
from unidist_tensorflow.compression import BF16Compressor, FP16Compressor, NoneCompressor
from unidist_tensorflow.memory import (
    Array,
    array_of,
    array_of_buffer,
    buffer_of_array,
    dtype_of,
    empty_array,
    tensor_of_array,
)

_OWN: dict[Any, GradientCompressor | None] = {
    NoneCompressor: None,
    FP16Compressor: Float16(),
    BF16Compressor: BFloat16(),
}


def compressor_of(compression: Any, registry: Registry[CompressorSpec]) -> GradientCompressor | None:
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


@dataclass(frozen=True)
class PerTensor(GradientCompressor):
    """Compresses each gradient by a compressor of Horovod's kind. Tensors are added up in their compressed form.

    Its two functions are given eager tensors, in graphs too: the exchange is a Python function there.

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
    def __init__(self, bucket: Bucket, compressor: Any) -> None:
        self._compressor = compressor
        self._communicator = bucket.communicator
        self._gradients = [
            array_of_buffer(bucket.memory.slice(slot.offset, slot.count), parameter.shape)
            for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True)
        ]
        self.num_operations = len(self._gradients)

    def allreduce(self, scale: float) -> Work:
        """See `BucketCompressor.allreduce`."""
        parts = []
        for gradient in self._gradients:
            with tf.device("CPU:0"):
                compressed, ctx = self._compressor.compress(tf.constant(gradient))  # a copy: tensors do not change
                compressed = tf.convert_to_tensor(compressed)
            dtype_of(compressed)
            array = array_of(compressed)
            wire = empty_array(array.shape, array.dtype)
            wire[...] = array
            buffer = buffer_of_array(wire)
            parts.append((gradient, wire, ctx, self._communicator.allreduce(buffer, buffer, scale=scale)))
        return _Decompression(self._compressor, parts)


class _Decompression(Work):
    def __init__(self, compressor: Any, parts: list[tuple[Array, Array, Any, Work]]) -> None:
        self._compressor = compressor
        self._parts = parts

    def wait(self, timeout: timedelta | None = None) -> None:
        """See `Work.wait`."""
        while self._parts:
            gradient, wire, ctx, work = self._parts[0]
            work.wait(timeout)
            self._parts.pop(0)
            with tf.device("CPU:0"):
                result = tf.convert_to_tensor(self._compressor.decompress(tensor_of_array(wire), ctx))
            gradient[...] = array_of(result).reshape(gradient.shape)

    def done(self) -> bool:
        """See `Work.done`."""
        return all(work.done() for _, _, _, work in self._parts)
