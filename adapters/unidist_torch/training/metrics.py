"""torchmetrics metrics over the samples of all ranks.

By itself torchmetrics synchronizes only if torch.distributed is initialized, which it is not here: each rank would
report the value for its own samples.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from unidist.errors import UsageError
from unidist.runtime import context
from unidist.training.sample_axis import SampleAxis
from unidist_torch.memory import DTYPES, buffer_of

MetricT = TypeVar("MetricT", bound=torch.nn.Module)

_MOST_DIMS = 8


def metrics(metric: MetricT) -> MetricT:
    """Compute torchmetrics metrics over the samples of all ranks; returns what was given.

        accuracy = ud.metrics(torchmetrics.Accuracy("multiclass", num_classes=10))

    Each rank updates the metric with its own samples, of which ranks may have different numbers. `compute` is
    collective and returns the value that one process would. Ranks that train on the same samples (of a divided model)
    count once. A metric that already has a `dist_sync_fn` keeps it.

    Args:
        metric: a metric, a collection, or any module with metrics in it.

    Raises:
        UsageError: there is no metric in it.
    """
    if not sync_metrics(metric):
        raise UsageError(f"metrics: {type(metric).__name__} is no torchmetrics metric, and contains none")
    return metric


def sync_metrics(module: torch.nn.Module) -> int:
    """Set up the metrics in a module as `metrics` does; returns how many there are, which may be none."""
    found: list[Any] = [each for each in module.modules() if hasattr(each, "_sync_dist")]
    for each in found:
        each.distributed_available_fn = _has_several_shares
        if each.dist_sync_fn is None:
            each.dist_sync_fn = gather_tensors
    return len(found)


def gather_tensors(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Return the tensors of all ranks with different samples, in their order. Collective over them.

    Args:
        tensor: of as many dims on every rank, of any sizes. One without elements may have any dims, and any type.
        group: for torchmetrics' sake.
    """
    del group
    axis = context.current().owned(SampleAxis)
    if tensor.dim() > _MOST_DIMS:
        raise UsageError(f"a state of a metric has {tensor.dim()} dims; at most {_MOST_DIMS} can be gathered")
    kinds = list(DTYPES)
    own = [kinds.index(tensor.dtype), tensor.dim(), *tensor.shape, *[0] * (_MOST_DIMS - tensor.dim())]
    told = axis.numbers_of_all(own)
    shapes = [torch.Size(each[2 : 2 + each[1]]) for each in told]
    sizes = [shape.numel() for shape in shapes]
    filled = [place for place, size in enumerate(sizes) if size]
    if not filled:
        return [tensor.detach() for _ in told]
    # Who has had no samples yet has an empty list, of whatever type.
    dtype, rest = kinds[told[filled[0]][0]], shapes[filled[0]][1:]
    source = tensor.detach().to(dtype).contiguous().reshape(-1)
    target = source.new_empty(sum(sizes))
    axis.gather(buffer_of(source), buffer_of(target), sizes)
    parts = zip(target.split(sizes), shapes, strict=True)
    return [part.reshape(shape) if part.numel() else part.reshape(0, *rest) for part, shape in parts]


def _has_several_shares() -> bool:
    return context.is_initialized() and context.current().owned(SampleAxis).size > 1


__all__ = ["gather_tensors", "metrics", "sync_metrics"]
