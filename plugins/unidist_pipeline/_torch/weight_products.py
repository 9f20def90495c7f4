"""Weights whose gradient is a product of two matrices, which can be added to the sum over micro-batches directly.

Most weights are those of linear layers, used once, as `addmm(bias, x, weight.t())`. Autograd writes the gradient of
each micro-batch into new memory, from where it is read again to be added to the sum: with micro-batches of 64 rows
that takes a third as long as the product. BLAS adds to what is there while it multiplies. So autograd is not asked for
these gradients: when the gradient of the operation's result arrives, the product is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from unidist_pipeline._torch.autograd_graph import Users

_OPERATIONS = {"AddmmBackward0": ("mat1", 2), "MmBackward0": ("self", 1)}
"""Operations x @ w: what x is called among what autograd has saved, and which of the arguments w is."""


@dataclass(frozen=True)
class Product:
    """The gradient of a weight.

    Args:
        weight: of shape `(n, m)`.
        node: the operation that uses it.
        saved: the name of what the node has kept, x of shape `(num_rows, m)`; not transposed: `(num_rows, n)`.
        transposed: the operation is x @ weight.t(), not x @ weight.
    """

    weight: torch.Tensor
    node: Node
    saved: str
    transposed: bool

    def factors(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the matrices of which the weight's gradient is the product.

        Args:
            gradient: of the operation's result; what autograd has saved must still be there.
        """
        x: torch.Tensor = getattr(self.node, self.saved)
        return (gradient.t(), x) if self.transposed else (x.t(), gradient)


def may_be_product(weight: torch.Tensor) -> bool:
    """Return whether the gradient of a weight is a product if the weight is used like that of a linear layer."""
    # On other devices the order of what several streams compute would have to be seen to.
    plain = weight.is_cpu and weight.layout is torch.strided and weight.dim() == 2 and weight.is_floating_point()
    return plain and not weight._backward_hooks  # which want to see the gradient


def find_products(weights: Sequence[torch.Tensor], users: Users, roots: set[Node]) -> list[Product]:
    """Return the products among the weights' gradients; all other weights are autograd's.

    Args:
        weights: those that are trained.
        users: of the recorded graph.
        roots: where the backward pass begins.
    """
    found = (_product(each, users, roots) for each in weights if may_be_product(each))
    return [each for each in found if each is not None]


def _product(weight: torch.Tensor, users: Users, roots: set[Node]) -> Product | None:
    below: Any = get_gradient_edge(weight).node
    node = _only_user(below, users, roots)
    transposed = node is not None and node.name() == "TBackward0"
    if transposed:
        below = node
        node = _only_user(below, users, roots)
    if node is None or node.name() not in _OPERATIONS:
        return None
    kept, place = _OPERATIONS[node.name()]
    if node.next_functions[place][0] is not below or getattr(node, "_saved_alpha", 1) != 1:
        return None
    # What hooks bring back (recomputed, or moved elsewhere) may be asked for once only: by autograd.
    if getattr(getattr(node, f"_raw_saved_{kept}"), "unpack_hook", "an older PyTorch does not tell") is not None:
        return None
    return Product(weight, node, f"_saved_{kept}", transposed)


def _only_user(node: Node, users: Users, roots: set[Node]) -> Node | None:
    found = users.get(node, ())
    return found[0] if len(found) == 1 and node not in roots else None
