"""The whole batch, gathered from the ranks: for losses that compare samples with each other."""

from __future__ import annotations

import torch

from unidist.errors import OperationError
from unidist.runtime import context
from unidist.training.sample_axis import SampleAxis
from unidist_torch.memory import buffer_of
from unidist_torch.operations.differentiable import apply_pair

__all__ = ["gather_samples"]


def gather_samples(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks that have different samples, in rank order: the whole batch.

    For losses over pairs of samples (CLIP, SimCLR), memory banks and metrics. With the average of the ranks' gradients
    (`distribute`, `TrainStep`) training matches one process whose loss is the mean of the ranks' losses. A rank may
    compute the loss of the whole batch, or the loss of its local rows against all rows. (`allgather` differs: it also
    gathers from ranks that train on the same samples, and its gradient is Horovod's.)

    Collective over the ranks that have different samples, and so is its backward pass.

    Args:
        tensor: `(rows, ...)`; all dims but the first are equal on every rank. Integers and bools have no gradient.

    Raises:
        NotInitializedError: `init()` was not called.
        OperationError: it has no rows.
        PeerLostError: a rank is gone, or did not come in time.
    """
    if not tensor.dim():
        raise OperationError("gather_samples gathers rows; a scalar has none")
    axis = context.current().owned(SampleAxis)
    if axis.size == 1:
        return tensor
    rows = axis.rows_of_all(len(tensor))

    def gather(own: torch.Tensor) -> torch.Tensor:
        source = own.contiguous()
        target = source.new_empty((sum(rows), *source.shape[1:]))
        axis.gather(buffer_of(source), buffer_of(target), rows)
        return target

    def scatter_sum(whole: torch.Tensor) -> torch.Tensor:
        source = whole.contiguous()
        target = source.new_empty((rows[axis.rank], *source.shape[1:]))
        axis.scatter_sum(buffer_of(source), buffer_of(target), rows)
        return target

    return apply_pair(tensor, gather, scatter_sum)
