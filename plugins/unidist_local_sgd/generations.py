"""Synchronizing among those ranks of a new generation of an elastic job that hold the last commit, in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unidist.buffer import HOST, Buffer, DType
from unidist.negotiation import gather_objects

if TYPE_CHECKING:
    from unidist.communicator import Communicator
    from unidist.framework import Framework

Tensors = Mapping[str, tuple[Sequence[int], Buffer]]
"""Shape and memory by name, see `KeepsTensors`."""


@dataclass(frozen=True)
class Kept:
    """A rank's place in its window, with a commit.

    Args:
        position: updates since all parameters were equal.
        slots_differ: the ranks' optimizers have different state.
        starts: copies of the parameters at the start of the window; empty where they are not needed.
        velocities: copies of the outer momentum.
    """

    position: int
    slots_differ: bool
    starts: Sequence[Buffer]
    velocities: Sequence[Buffer]


def copies(framework: Framework, buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return copies of flat memory."""
    found = []
    for each in buffers:
        found.append(framework.allocate(each.count, each.dtype, each.memory))
        framework.convert(each, found[-1])
    return found


def average(communicator: Communicator, framework: Framework, values: Buffer) -> None:
    """Replace values by their mean over the ranks. Collective; by way of the host if they are elsewhere."""
    held = values
    if values.memory != HOST:
        held = framework.allocate(values.count, values.dtype, HOST)
        framework.convert(values, held)
    communicator.allreduce(held, held, scale=1.0 / communicator.size).wait()
    if held is not values:
        framework.convert(held, values)


def shared_names(communicator: Communicator, tensors: Mapping[str, Buffer]) -> list[str]:
    """Return the names of those tensors that every rank has in the same size, in the same order. Collective."""
    everyone: list[dict[str, int]] = gather_objects(
        communicator, {name: tensor.count for name, tensor in tensors.items()}
    )
    return sorted(name for name in tensors if all(each.get(name) == tensors[name].count for each in everyone))


def from_first(communicator: Communicator, tensors: Tensors) -> Tensors:
    """Return the tensors of rank 0 on every rank, in host memory. Collective.

    Args:
        communicator: over the ranks.
        tensors: of this rank, in host memory; those of other ranks than 0 are ignored.
    """
    outline = {name: (tuple(shape), memory.count, str(memory.dtype)) for name, (shape, memory) in tensors.items()}
    first: dict[str, tuple[tuple[int, ...], int, str]] = gather_objects(
        communicator, outline if communicator.rank == 0 else {}
    )[0]
    found = {}
    for name, (shape, count, dtype) in first.items():
        memory = tensors[name][1] if communicator.rank == 0 else Buffer.allocate(count, DType(dtype))
        communicator.broadcast(memory, root=0).wait()
        found[name] = (shape, memory)
    return found
