"""Operations on tensors over one communicator: ordered, without names, gradients or negotiation."""

from __future__ import annotations

import torch

from unidist.communicator import Communicator, ReduceOp
from unidist_torch.memory import buffer_of

__all__ = ["allreduced"]


def allreduced(communicator: Communicator, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> torch.Tensor:
    """Return the element-wise reduction of all ranks' tensors, a new contiguous tensor. Collective.

    Args:
        communicator: moves the memory that the tensor is in.
        tensor: of equal shape and dtype on every rank.
        op: the reduction.

    Raises:
        PeerLostError: a rank of the communicator was lost, or did not come within its timeout.
    """
    source = tensor.contiguous()
    target = torch.empty_like(source)
    communicator.allreduce(buffer_of(source), buffer_of(target), op=op).wait()
    return target
