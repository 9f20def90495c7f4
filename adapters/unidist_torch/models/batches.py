"""Batches as structures of tensors, and pieces of their samples."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


def cut(value: Any, piece: tuple[int, int], *, total: int) -> Any:
    """Return some samples of a batch: of every tensor whose first dim is that of the samples.

    Args:
        value: tensors in tuples, lists and mappings; others stay as they are.
        piece: the first sample, and the one after the last.
        total: samples of the batch.
    """
    if piece == (0, total):
        return value
    start, stop = piece

    def take(item: Any) -> Any:
        return item[start:stop] if item.dim() and item.shape[0] == total else item

    return pytree.tree_map_only(torch.Tensor, take, value)


def num_samples(inputs: Any) -> int:
    """Return the number of samples of a batch: the first dim of its first tensor; 0 if it has none."""
    tensors = (leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim())
    first = next(tensors, None)
    return 0 if first is None else first.shape[0]


def check_samples(inputs: Any, targets: Any, total: int) -> None:
    """Make sure that inputs and targets can be cut.

    Raises:
        ValueError: there is no tensor that has the samples along its first dim.
    """
    for value in (inputs, targets):
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if not any(tensor.dim() and tensor.shape[0] == total for tensor in tensors):
            raise ValueError(f"no tensor has {total} samples along its first dim: {[list(t.shape) for t in tensors]}")
