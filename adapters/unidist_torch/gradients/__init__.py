"""Gradients of PyTorch's parameters: compressors, sparse gradients, and what stands for sharded and partial ones.

May import `operations` and the modules at the root of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_torch.gradients.compression import CompressionLike, TensorCompressor
    from unidist_torch.gradients.parameters import reattach, shaped
    from unidist_torch.gradients.partial_gradient import PartNorms
    from unidist_torch.gradients.placeholder import ShardedGradient, sharded_gradient

__all__ = [
    "CompressionLike",
    "PartNorms",
    "ShardedGradient",
    "TensorCompressor",
    "reattach",
    "shaped",
    "sharded_gradient",
]

__getattr__ = lazy_names(
    __name__,
    {
        "compression": "CompressionLike TensorCompressor",
        "parameters": "reattach shaped",
        "partial_gradient": "PartNorms",
        "placeholder": "ShardedGradient sharded_gradient",
    },
)
