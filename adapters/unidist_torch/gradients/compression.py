"""The argument `compression=`: a name, a compressor of unidist, or one of single tensors in Horovod's style."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from typing_extensions import override

from unidist.buffer import Buffer
from unidist.builtin.half import BFloat16, Float16
from unidist.errors import UsageError
from unidist.gradients import CompressorSpec
from unidist.gradients.compression import GradientCompressor
from unidist.gradients.per_tensor import PerTensor, TensorAccess
from unidist.horovod_api.arguments import bucket_compressor
from unidist.registry import Registry
from unidist_torch.memory import buffer_of, tensor_of
from unidist_torch.operations.compression import BF16Compressor, FP16Compressor, NoneCompressor


class TensorCompressor(Protocol):
    """Horovod's interface of a compressor: a class or an object with these two methods."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to add up instead of `tensor`, and the context that `decompress` needs."""

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
        ValueError: not a compressor.
    """
    return bucket_compressor(
        compression, registry, members=_OWN, otherwise=lambda given: PerTensor.of(given, TorchTensors())
    )


def tensor_compressor(compression: CompressionLike) -> TensorCompressor:
    """Return a compressor of single tensors, for gradients that are not exchanged in buckets.

    Raises:
        UsageError: one of buckets.
    """
    if isinstance(compression, str | GradientCompressor):
        raise UsageError(
            f"compression={compression!r} compresses buckets of gradients, but op=Adasum exchanges single tensors; "
            "use a member of Compression, or a class like Horovod's Compressor"
        )
    return cast(TensorCompressor, compression)


class TorchTensors(TensorAccess):
    """Gradients as PyTorch's tensors."""

    @override
    def view(self, memory: Buffer, shape: Sequence[int]) -> torch.Tensor:
        return tensor_of(memory, shape)

    @override
    def compress(self, compressor: TensorCompressor, gradient: torch.Tensor) -> tuple[torch.Tensor, Buffer, Any]:
        compressed, ctx = compressor.compress(gradient)
        wire = compressed.detach().contiguous()
        return wire, buffer_of(wire), ctx

    @override
    def decompress(self, compressor: TensorCompressor, gradient: torch.Tensor, reduced: torch.Tensor, ctx: Any) -> None:
        with torch.no_grad():
            gradient.copy_(compressor.decompress(reduced, ctx))
