"""Gradients of PyTorch's parameters: compressors, sparse gradients, and what stands for sharded and partial ones.

May import `operations` and the modules at the root of this package.
"""

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
