"""Compression of single tensors around an operation, by Horovod's names and with its interface."""

from __future__ import annotations

from typing import Any

import torch

from unidist.horovod_api.compression import Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _CastCompressor(Compressor):
    wire: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor in the smaller type if it is of floating point."""
        return (tensor.to(cls.wire) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its original type."""
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Reduces floating-point tensors in float16."""

    wire = torch.float16


class BF16Compressor(_CastCompressor):
    """Reduces floating-point tensors in bfloat16, which has the range of float32."""

    wire = torch.bfloat16


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
