"""Metrics of torchmetrics in a LightningModule: computed over the samples of all ranks.

They look for torch.distributed, which is not initialized here, and would give each rank the value of its own samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torchmetrics import Metric

import unidist.torch as ud


def sync_metrics(module: torch.nn.Module) -> None:
    """Let all metrics in a module, and those in their collections, gather by unidist's operations."""
    for each in module.modules():
        if isinstance(each, Metric):
            each.distributed_available_fn = _has_several_ranks
            if each.dist_sync_fn is None:
                each.dist_sync_fn = gather_tensors


def gather_tensors(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in their order; those of one rank may be longer along any dim. Collective."""
    del group
    shapes = ud.allgather_object(tuple(tensor.shape))
    flat = ud.allgather(tensor.detach().contiguous().reshape(-1))
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.reshape(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def _has_several_ranks() -> bool:
    return ud.is_initialized() and ud.size() > 1
