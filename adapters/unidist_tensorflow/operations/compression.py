"""Compression of single tensors around an operation, by Horovod's names and with its interface."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from unidist.horovod_api.compression import Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


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
