"""Compression of single tensors around an operation, by Horovod's names and with its interface."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """Compresses a tensor before it is reduced, and brings the result back. Without state: both are static."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return what is reduced instead of `tensor`, and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Return the result in the form of the original tensor."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Return the tensor itself."""
        return tensor


class _CastCompressor(Compressor):
    wire: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the tensor in the smaller type if it is of floating point."""
        dtype = tf.as_dtype(tensor.dtype)
        return (tf.cast(tensor, cls.wire) if dtype.is_floating else tensor), dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Return the tensor in its original type."""
        return tf.cast(tensor, ctx)


class FP16Compressor(_CastCompressor):
    """Reduces floating-point tensors in float16."""

    wire = tf.float16


class BF16Compressor(_CastCompressor):
    """Reduces floating-point tensors in bfloat16, which has the range of float32."""

    wire = tf.bfloat16


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
