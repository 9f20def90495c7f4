"""Horovod's autograd functions by their names, for scripts that call `HorovodAllreduce.apply(...)`.

The operations of `reductions` and `movement` are differentiable themselves; these only take Horovod's arguments in
the order in which its autograd functions have them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unidist.horovod_api.reduce_ops import Op
from unidist.negotiation.process_sets import ProcessSet
from unidist_torch.operations.compression import Compression
from unidist_torch.operations.movement import allgather, alltoall, broadcast, grouped_allgather
from unidist_torch.operations.reductions import allreduce, grouped_allreduce, grouped_reducescatter, reducescatter

Tensors = tuple[torch.Tensor, ...]
_NONE = Compression.none


class HorovodAllreduce:
    """See `allreduce`."""

    @staticmethod
    def apply(
        tensor: torch.Tensor,
        average: bool | None,
        name: str | None,
        op: Op | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        """Return the reduction of a tensor."""
        return allreduce(tensor, average, name, _NONE, op, prescale_factor, postscale_factor, process_set)


class HorovodGroupedAllreduce:
    """See `grouped_allreduce`."""

    @staticmethod
    def apply(
        average: bool | None,
        name: str | None,
        op: Op | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> Tensors:
        """Return the reductions of the tensors."""
        found = grouped_allreduce(tensors, average, name, _NONE, op, prescale_factor, postscale_factor, process_set)
        return tuple(found)


class HorovodAllgather:
    """See `allgather`."""

    @staticmethod
    def apply(tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        """Return the tensors of all ranks."""
        return allgather(tensor, name, process_set)


class HorovodGroupedAllgather:
    """See `grouped_allgather`."""

    @staticmethod
    def apply(name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Tensors:
        """Return, for each tensor, those of all ranks."""
        return tuple(grouped_allgather(tensors, name, process_set))


class HorovodBroadcast:
    """See `broadcast`."""

    @staticmethod
    def apply(tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        """Return the tensor of one rank."""
        return broadcast(tensor, root_rank, name, process_set)


class HorovodAlltoall:
    """See `alltoall`."""

    @staticmethod
    def apply(
        tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's rows of all tensors; with splits, how many are from each rank, too."""
        return alltoall(tensor, splits, name, process_set)


class HorovodReducescatter:
    """See `reducescatter`."""

    @staticmethod
    def apply(
        tensor: torch.Tensor,
        name: str | None,
        op: Op,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
    ) -> torch.Tensor:
        """Return this rank's rows of the reduction."""
        return reducescatter(tensor, name, _NONE, op, process_set, prescale_factor, postscale_factor)


class HorovodGroupedReducescatter:
    """See `grouped_reducescatter`."""

    @staticmethod
    def apply(
        name: str | None,
        op: Op,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: torch.Tensor,
    ) -> Tensors:
        """Return this rank's rows of the reductions."""
        return tuple(grouped_reducescatter(tensors, name, _NONE, op, process_set, prescale_factor, postscale_factor))


__all__ = [
    "HorovodAllgather", "HorovodAllreduce", "HorovodAlltoall", "HorovodBroadcast", "HorovodGroupedAllgather",
    "HorovodGroupedAllreduce", "HorovodGroupedReducescatter", "HorovodReducescatter",
]  # fmt: skip
