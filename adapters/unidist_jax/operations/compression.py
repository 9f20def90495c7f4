"""Compression of single arrays around an operation, by Horovod's names and with its interface."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from unidist.horovod_api.compression import Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _CastCompressor(Compressor):
    wire: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the array in the smaller type if it is of floating point."""
        is_floating = jnp.issubdtype(tensor.dtype, jnp.floating)
        return (tensor.astype(cls.wire) if is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the array in its original type."""
        return tensor.astype(ctx)


class FP16Compressor(_CastCompressor):
    """Reduces floating-point arrays in float16."""

    wire = jnp.float16


class BF16Compressor(_CastCompressor):
    """Reduces floating-point arrays in bfloat16, which has the range of float32."""

    wire = jnp.bfloat16


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
