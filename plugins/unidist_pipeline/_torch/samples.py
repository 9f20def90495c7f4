"""The samples of a batch: along the first dim of its tensors."""

from __future__ import annotations

from typing import Any

import torch

from unidist_pipeline._torch.tracing.values import changed, tensors_in


def num_samples(value: Any) -> int:
    """Return the first dim of a structure's first tensor that has one; 0 if there is none."""
    return next((int(tensor.shape[0]) for tensor in tensors_in(value) if tensor.dim()), 0)


def cut(value: Any, total: int, piece: tuple[int, int]) -> Any:
    """Return some samples of a structure: a slice of every tensor whose first dim has the batch's size."""
    if piece == (0, total):
        return value
    start, stop = piece

    def take(item: Any) -> Any:
        has_samples = isinstance(item, torch.Tensor) and item.dim() and item.shape[0] == total
        return item[start:stop] if has_samples else item

    return changed(take, value)
