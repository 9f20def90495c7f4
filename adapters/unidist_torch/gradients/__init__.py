"""Gradients of PyTorch's parameters: compressors, sparse gradients, and placeholders for sharded ones.

May import `operations` and the modules at the root of this package.
"""

from unidist_torch.gradients.compression import CompressionLike, TensorCompressor
from unidist_torch.gradients.parameters import reattach, shaped
from unidist_torch.gradients.placeholder import ShardedGradient, sharded_gradient

__all__ = ["CompressionLike", "ShardedGradient", "TensorCompressor", "reattach", "shaped", "sharded_gradient"]
