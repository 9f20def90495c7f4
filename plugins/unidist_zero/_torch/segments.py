"""The tensors that an inner optimizer steps on: this rank's pieces, joined into flat segments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from unidist.runtime import context
from unidist_torch.gradients.parameters import shaped
from unidist_torch.host_copies import HostCopy
from unidist_torch.memory import is_dense
from unidist_torch.optimizer.narrow_step import ElementRange, SteppedTensor
from unidist_torch.parameter_states import ParameterState
from unidist_zero._torch.parameters.offload import StateMemory
from unidist_zero.sharding.partition import Piece, Segment, join_segments

_log = logging.getLogger("unidist")

_PART = 1 << 20  # elements that the host compares at a time
_PART_ON_DEVICE = 1 << 23


class SegmentTensor:
    """One segment as a leaf that an optimizer can update.

    Args:
        span: the pieces, and where they are in the bucket.
        group: number of the optimizer's parameter group.
        flat: the segment's elements of the parameters, `(span.count,)`.
        gradient: returns the segment's elements of the reduced gradients, likewise; their memory comes and goes.
        form: the parameter whose shape the leaf has, if the segment is one whole parameter; None: the leaf is flat.
        master: the type in which a copy is updated, if that differs from the type of `flat`.
        memory: where copies are kept; None: beside `flat`.
        is_copied: step on a copy in `memory`, even one of the same type.

    Attributes:
        leaf: what the optimizer steps on.
    """

    def __init__(
        self,
        span: Segment,
        group: int,
        flat: torch.Tensor,
        gradient: Callable[[], torch.Tensor],
        *,
        form: torch.Tensor | None = None,
        master: torch.dtype | None = None,
        memory: StateMemory | None = None,
        is_copied: bool = False,
    ) -> None:
        self.span = span
        self.group = group
        self.flat = flat.detach()
        self._gradient = gradient
        self.form = form
        self.master = master
        self.is_copied = is_copied or master is not None
        self._memory = memory
        self._fetched: HostCopy | None = None
        self._parameters: HostCopy | None = None
        self._staging: torch.Tensor | None = None  # pinned host memory of the parameters' type
        base = self._base = self._copy(master or flat.dtype) if self.is_copied else self.flat
        self.leaf = self._formed(base.detach()).requires_grad_(base.is_floating_point() or base.is_complex())

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of the segment."""
        return self.span.pieces

    def fetch(self, *, gradient: bool) -> None:
        """Begin to copy to the host what it needs, if that is where the leaf is. First of all, for all segments.

        Args:
            gradient: it needs the gradient too, which must not be written to before `set_gradient`.
        """
        if self._memory is None:
            return
        if self.is_copied and self._memory.is_away(self.flat):
            self._parameters = HostCopy(self.flat)
        if gradient:
            current = self._gradient()
            if self._memory.is_away(current):
                self._fetched = HostCopy(current)

    def set_gradient(self, factor: float) -> None:
        """Give the leaf its gradient.

        Args:
            factor: what the gradient is still to be multiplied by, when it is converted to the master's type.
        """
        fetched, self._fetched = self._fetched, None
        gradient = self._gradient() if fetched is None else fetched.wait()
        if self.master is not None:
            gradient = gradient.to(self.master).mul_(factor)
        elif factor != 1.0 or gradient.dtype is not self.leaf.dtype:
            gradient = (gradient * factor).to(self.leaf.dtype)
        self.leaf.grad = self._formed(gradient)

    def write_back(self) -> None:
        """Copy what the optimizer has made of a copy to the parameters, rounded."""
        if not self.is_copied:
            return
        # An accelerator need not be waited for: nobody writes to the copy before the next gradient has come here.
        staging, self._staging = self._staging, None
        if staging is None:
            self._formed(self.flat).copy_(self.leaf.detach(), non_blocking=True)
        else:
            self.flat.copy_(staging.copy_(self._base), non_blocking=True)

    def follow_parameters(self) -> None:
        """Update the copy where somebody has written to the parameters: a checkpoint, `load_state_dict`. After `fetch`.

        They are compared with it, as what is written through `parameter.data` leaves no trace. The host does not wait
        for an accelerator.
        """
        if not self.is_copied:
            return
        fetched, self._parameters = self._parameters, None
        flat = self.flat if fetched is None else fetched.wait()
        if fetched is not None and self.master is not None:
            self._staging = flat  # torch would convert what is written back in memory that is not pinned
        # In parts: what is computed on the way takes memory too.
        size = _PART if flat.is_cpu else _PART_ON_DEVICE
        for kept, current in zip(torch.split(self._base, size), torch.split(flat, size), strict=True):
            changed = kept.to(current.dtype) != current
            if not changed.is_cpu or changed.any():
                kept.copy_(torch.where(changed, current.to(kept.dtype), kept))

    def stepped(self, first: int) -> SteppedTensor:
        """Return the leaf as a tensor that an optimizer steps on.

        Args:
            first: number of the exchange's first parameter among all.
        """
        ranges = [
            ElementRange(first + piece.parameter, piece.start, piece.offset - self.span.offset, piece.count)
            for piece in self.pieces
        ]
        return SteppedTensor(self.leaf, self.group, ranges)

    def is_slot(self, value: Any) -> bool:
        """Return whether an entry of the optimizer's state has an element for each of the leaf's."""
        return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == self.leaf.shape

    def flat_slot(self, value: torch.Tensor) -> torch.Tensor:
        """Return such an entry in the order of the leaf's memory, `(span.count,)`, without a copy if possible."""
        return value if self.form is None else _in_memory_order(value, self.form)

    def split(self, keys: Sequence[Hashable], state: ParameterState) -> list[tuple[SegmentTensor, ParameterState]]:
        """Return smaller segments, of neighbours with equal keys, each with its part of this one's state."""
        assert self.form is None, "a segment that is one whole parameter has one piece"
        made = []
        for segment in join_segments(self.pieces, keys):
            begin, end = segment.offset - self.span.offset, segment.offset - self.span.offset + segment.count
            part = SegmentTensor(
                segment,
                self.group,
                self.flat[begin:end],
                partial(_part, self._gradient, begin, end),
                master=self.master,
                memory=self._memory,
                is_copied=self.is_copied,
            )
            with torch.no_grad():
                if self.is_copied:
                    part.leaf.copy_(self.leaf[begin:end])
            made.append((part, {name: self._part_of(value, begin, end) for name, value in state.items()}))
        return made

    def _copy(self, dtype: torch.dtype) -> torch.Tensor:
        if self._memory is None:
            return self.flat.to(dtype)
        copied = self._memory.zeros_like(self.flat, dtype)
        copied.copy_(self.flat)
        return copied

    def _part_of(self, value: Any, begin: int, end: int) -> Any:
        if self.is_slot(value):
            return value[begin:end].clone()  # a view would keep all of it
        return value.clone() if isinstance(value, torch.Tensor) else value

    def _formed(self, flat: torch.Tensor) -> torch.Tensor:
        return flat if self.form is None else shaped(flat, self.form)


def _part(gradient: Callable[[], torch.Tensor], begin: int, end: int) -> torch.Tensor:
    return gradient()[begin:end]


def form_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the parameter's shape and memory order, without memory; row-major if there are gaps."""
    if not is_dense(parameter):
        return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")


def lay_out_by_dims(parameters: Iterable[torch.Tensor]) -> None:
    """Give parameters in another memory order than that of their dims (channels_last) memory in that order.

    Their shards are then ranges of the whole parameter, which a checkpoint can keep. Convolutions of inputs in
    channels_last compute as before, and convert the weight each time.
    """
    moved = [each for each in parameters if not each.is_meta and not each.is_contiguous()]
    for parameter in moved:
        parameter.data = parameter.data.contiguous()
    if moved and context.current().topology.rank == 0:
        _log.warning(
            "zero: %d parameter(s) in another memory order than that of their dims (channels_last) now are in that "
            "order, so that shards of them can be saved. Inputs and activations may stay as they are; zero=1 and "
            "zero=2 with whole=true keep the parameters, too",
            len(moved),
        )


def piece_in_memory_order(value: torch.Tensor, piece: Piece, parameter: torch.Tensor) -> torch.Tensor:
    """Return a piece's elements of a tensor of the parameter's shape."""
    return _in_memory_order(value, parameter)[piece.start : piece.start + piece.count]


def _in_memory_order(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return all elements flat, in the memory order of `parameter`."""
    if not is_dense(parameter):
        return value.reshape(-1)
    strides = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda dim: (-strides[dim], dim))
    return value.permute(order).reshape(-1)
