"""Lifecycle and topology, by Horovod's names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unidist import context
from unidist.buffer import Buffer
from unidist.communicator import Communicator
from unidist_torch.memory import DTYPES, buffer_of, tensor_of


def init() -> None:
    """Start unidist in this process; every rank calls it once. Called again, it does nothing.

    Under `unidist launch`, torchrun, horovodrun, mpirun or srun it finds its place in their variables; without any
    of them this process is the only rank.
    """
    context.init()


def shutdown() -> None:
    """End unidist in this process. `init()` may be called again. Without `init()` it does nothing."""
    context.shutdown()


def is_initialized() -> bool:
    """Say whether `init()` was called, and `shutdown()` not since."""
    return context.is_initialized()


def rank() -> int:
    """Return the rank of this process, from 0."""
    return context.current().topology.rank


def size() -> int:
    """Return the number of processes."""
    return context.current().topology.world_size


def local_rank() -> int:
    """Return the rank of this process among those of its host."""
    return context.current().topology.local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return context.current().topology.local_size


def cross_rank() -> int:
    """Return the index of this host."""
    return context.current().topology.node_rank


def cross_size() -> int:
    """Return the number of hosts."""
    return context.current().topology.num_nodes


def world() -> Communicator:
    """Return the communicator over all ranks: ordered, unnamed operations on buffers, with the least overhead.

    Every rank issues the same operations on it in the same order. `buffer(tensor)` makes its arguments.
    """
    return context.current().world


def buffer(tensor: torch.Tensor) -> Buffer:
    """Return the memory of a dense tensor as a buffer for a communicator, without a copy."""
    return buffer_of(tensor)


def empty(shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a zeroed CPU tensor in engine memory, which collectives move without a copy.

    It stays valid after `shutdown()`, as an ordinary tensor.
    """
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    kind = DTYPES[dtype]
    count = 1
    for dim in dims:
        count *= dim
    memory = context.current().world.allocate(count * kind.itemsize)
    return tensor_of(memory.cast(kind), dims)
