"""Rules for operations on divided tensors, by name, in one module for each kind of operation.

Importing this package fills `tensor.RULES`.
"""

from unidist_context_parallel._torch.rules import (
    along_dims,
    attending,
    elementwise,
    losses,
    metadata,
    products,
    randomness,
    shapes,
    token_layers,
)

__all__ = [
    "along_dims", "attending", "elementwise", "losses", "metadata", "products", "randomness", "shapes", "token_layers",
]  # fmt: skip
