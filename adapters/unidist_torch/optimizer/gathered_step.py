"""The inner step for optimizers that look at whole tensors, where parameters are cut over the ranks of an axis.

Each of these ranks gathers the parameter and its gradient, makes the step of the whole tensor, and keeps its part of
the parameter. The state is that of whole tensors, the same on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from unidist.buffer import HOST
from unidist.communicator import ReduceOp
from unidist.errors import ConfigurationError, UsageError
from unidist.negotiation.objects import gather_objects
from unidist_torch.memory import buffer_of, memory_kind
from unidist_torch.models import plain_use
from unidist_torch.optimizer.inner_step import WholeStep

if TYPE_CHECKING:
    from unidist.checkpoint.format.interface import KeepsState
    from unidist.checkpoint.format.pieces import Placement
    from unidist.communicator import Communicator
    from unidist.optim.update import Update


@dataclass(frozen=True)
class CutTensor:
    """A parameter of which this rank has a part.

    Args:
        parameter: this rank's part.
        placement: of it in the whole.
        axis: the mesh axis over whose ranks it is cut.
    """

    parameter: torch.Tensor
    placement: Placement
    axis: str

    @property
    def dim(self) -> int:
        """The dim along which it is cut."""
        sizes = zip(self.placement.local_shape, self.placement.shape, strict=True)
        return next(dim for dim, (own, whole) in enumerate(sizes) if own != whole)


class GatheredStep(WholeStep):
    """See the module's text. Creation is collective over the ranks of the axes.

    Args:
        optimizer: the bound optimizer.
        plain: its class before it was bound.
        update: the framework-free side.
        cut: the parameters that it looks at as a whole; the same ones on all ranks of their axis.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        plain: type[torch.optim.Optimizer],
        update: Update,
        cut: Sequence[CutTensor],
    ) -> None:
        super().__init__(optimizer, plain, update)
        if update.context.is_elastic:
            raise ConfigurationError(
                f"{plain.__name__} looks at whole tensors, and {cut[0].placement.name!r} is cut over the ranks of an "
                "elastic job: its state cannot follow when these change. Use an element-wise optimizer (AdamW), or a "
                "job that is not elastic"
            )
        self._cut = cut
        self._axes = [
            _Axis(update, axis, [each for each in cut if each.axis == axis])
            for axis in sorted({each.axis for each in cut})
        ]

    @override
    def step(self, grad_scaler: Any) -> Any:
        with plain_use(), self._whole():
            return super().step(grad_scaler)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Let the parameters and their gradients be whole meanwhile. Collective."""
        parts = [(each.parameter.data, each.parameter.grad) for each in self._cut]
        with torch.no_grad():
            for axis in self._axes:
                axis.gather()
        try:
            yield
        finally:
            with torch.no_grad():
                for each, (data, gradient) in zip(self._cut, parts, strict=True):
                    whole, each.parameter.grad = each.parameter.data, None
                    if whole.shape != data.shape:  # else nobody had a gradient
                        own = torch.tensor(each.placement.indices[each.dim], device=whole.device)
                        data.copy_(whole.index_select(each.dim, own))
                    each.parameter.data = data
                    each.parameter.grad = gradient

    @override
    def kept_state(self, placements: Mapping[int, Placement]) -> KeepsState:
        from unidist_torch.checkpoint.optimizer import OptimizerState

        whole = {id(each.parameter) for each in self._cut}
        return OptimizerState(
            self._optimizer,
            {
                identity: type(placement).whole(placement.name, placement.shape) if identity in whole else placement
                for identity, placement in placements.items()
            },
        )


class _Axis:
    """The ranks over which some parameters are cut.

    Args:
        update: the framework-free side.
        name: of the mesh axis.
        cut: the parameters.
    """

    def __init__(self, update: Update, name: str, cut: Sequence[CutTensor]) -> None:
        self._cut = cut
        kinds = {HOST} | {_kind(each.parameter) for each in cut}
        self._communicators: dict[str, Communicator] = {
            kind: update.context.new_communicator(name, memory=kind) for kind in sorted(kinds)
        }
        own = [(each.placement.name, each.dim, each.placement.indices[each.dim]) for each in cut]
        everywhere = gather_objects(self._communicators[HOST], own)
        if any([each[:2] for each in found] != [each[:2] for each in own] for found in everywhere):
            raise UsageError(
                f"the ranks of the axis {name!r} give their optimizers other parameters, or in another order. Make the "
                "optimizer in the same way on every rank"
            )
        self._indices = [[found[place][2] for found in everywhere] for place in range(len(cut))]
        """For each parameter and rank the indices along its dim that the rank has."""

    def gather(self) -> None:
        """Give the parameters whole values and gradients. Collective over the ranks.

        A gradient that some rank does not have (an expert there saw no sample) is zero there.
        """
        present = torch.tensor([each.parameter.grad is not None for each in self._cut], dtype=torch.int32)
        flags = buffer_of(present)
        self._communicators[HOST].allreduce(flags, flags, op=ReduceOp.MAX).wait()
        kinds: dict[tuple[str, torch.dtype], list[int]] = {}
        for place, each in enumerate(self._cut):
            if present[place]:
                kinds.setdefault((_kind(each.parameter), each.parameter.dtype), []).append(place)
        for (kind, _), places in kinds.items():
            self._gather(self._communicators[kind], places)

    def _gather(self, communicator: Communicator, places: Sequence[int]) -> None:
        """Gather what is in one kind of memory, and of one type, in one exchange."""
        parts: list[torch.Tensor] = []
        for place in places:
            parameter = self._cut[place].parameter
            gradient = parameter.grad
            parts += [parameter.data, torch.zeros_like(parameter.data) if gradient is None else gradient]
        source = torch.cat([part.reshape(-1) for part in parts])
        shapes = [[self._shape(place, rank) for place in places for _ in range(2)] for rank in range(communicator.size)]
        counts = [sum(shape.numel() for shape in of_rank) for of_rank in shapes]
        target = source.new_empty(sum(counts))
        communicator.allgather(buffer_of(source), buffer_of(target), counts=counts).wait()
        whole = [source.new_empty(self._cut[place].placement.shape) for place in places for _ in range(2)]
        for rank, (own, of_rank) in enumerate(zip(target.split(counts), shapes, strict=True)):
            for i, piece in enumerate(own.split([shape.numel() for shape in of_rank])):
                place = places[i // 2]
                indices = torch.tensor(self._indices[place][rank], device=piece.device)
                whole[i].index_copy_(self._cut[place].dim, indices, piece.view(of_rank[i]))
        for place, value, gradient in zip(places, whole[::2], whole[1::2], strict=True):
            parameter = self._cut[place].parameter
            parameter.grad = None  # which has to have the parameter's shape
            parameter.data = value
            parameter.grad = gradient

    def _shape(self, place: int, rank: int) -> torch.Size:
        """Return the shape of a rank's part."""
        shape = list(self._cut[place].placement.shape)
        shape[self._cut[place].dim] = len(self._indices[place][rank])
        return torch.Size(shape)


def _kind(parameter: torch.Tensor) -> str:
    return memory_kind(parameter).partition(":")[0]
