"""Bitwise reductions. Engines have none: values are gathered, and PyTorch reduces them on the rank that keeps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unidist_torch_backend.tensors import CallOperation, Finish, TensorScratch, buffer

Combine = Callable[..., torch.Tensor]
"""`torch.bitwise_and` and its like."""


def allreduce(scratch: TensorScratch, flat: torch.Tensor, size: int, combine: Combine) -> CallOperation:
    """Reduce a flat tensor over `size` ranks, in place."""
    count = flat.numel()
    everyone, release = scratch.empty(size * count, flat)
    source, target = buffer(flat), buffer(everyone)
    return CallOperation(lambda comm: comm.allgather(source, target), _reducing(everyone, flat, size, combine, release))


def reduce_scatter(
    scratch: TensorScratch, flat: torch.Tensor, source: torch.Tensor, sent: Sequence[int], combine: Combine
) -> CallOperation:
    """Reduce a tensor over the ranks, and leave this rank its part.

    Args:
        scratch: lends memory.
        flat: takes this rank's part.
        source: all parts, one after the other.
        sent: elements of each rank's part.
        combine: the reduction.
    """
    size, count = len(sent), flat.numel()
    received, release = scratch.empty(size * count, flat)
    given, target = buffer(source), buffer(received)
    return CallOperation(
        lambda comm: comm.alltoall(given, target, send_counts=sent, receive_counts=[count] * size),
        _reducing(received, flat, size, combine, release),
    )


def _reducing(gathered: torch.Tensor, flat: torch.Tensor, size: int, combine: Combine, release: Finish) -> Finish:
    """Return what reduces the values of all ranks into `flat`, and gives their memory back."""

    def reduce_here() -> None:
        rows = gathered.view(size, flat.numel())
        total = rows[0].clone()
        for row in rows[1:]:
            combine(total, row, out=total)
        flat.view(-1).copy_(total)
        release()

    return reduce_here
