"""Exchanges along the axis as autograd functions.

They come in conjugate pairs (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2): what one does
forward the other does backward. Every rank of the axis runs the same ones in the same order, forward and backward: it
computes the same batch with the same layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from unidist.communicator import ReduceOp
from unidist_tensor_parallel._torch.layers.rank_bound import RankBound
from unidist_tensor_parallel.layout.cuts import AXIS
from unidist_torch.memory import buffer_of, memory_kind
from unidist_torch.operations.communicators import allreduced
from unidist_torch.operations.differentiable import apply_pair, inside, needs_gradients

if TYPE_CHECKING:
    from unidist.communicator import Communicator
    from unidist.runtime_api import RuntimeAPI


class TensorAxis(RankBound):
    """The ranks that compute one model together, as seen by one of them. Creation is collective.

    Args:
        context: the runtime.
        kinds: kinds of memory that activations are in.

    Attributes:
        rank: of this rank on the axis.
        size: ranks on the axis.
        context: the runtime.
    """

    def __init__(self, context: RuntimeAPI, kinds: Iterable[str]) -> None:
        self._kinds = sorted({"host", *kinds})
        self.rebind(context)
        self.rank = self._communicators["host"].rank
        self.size = self._communicators["host"].size

    def rebind(self, context: RuntimeAPI) -> None:
        """Communicate in this context from now on, where this rank has the same place on the axis. Collective."""
        self.context = context
        self._communicators: dict[str, Communicator] = {
            kind: context.new_communicator(AXIS, memory=kind) for kind in self._kinds
        }
        self._last_entered: _Entered | None = None

    # Operations on tensors, without gradients.

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, a new tensor."""
        return allreduced(self._on(tensor), tensor)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum over all ranks, a new tensor."""
        return allreduced(self._on(tensor), tensor, ReduceOp.MAX)

    def gather(self, tensor: torch.Tensor, counts: Sequence[int], dim: int) -> torch.Tensor:
        """Return the tensors of all ranks, of `counts` elements along `dim`, concatenated along it."""
        source = tensor.contiguous()
        shapes = [_resized(source.shape, dim, count) for count in counts]
        sizes = [shape.numel() for shape in shapes]
        target = source.new_empty(sum(sizes))
        self._on(tensor).allgather(buffer_of(source), buffer_of(target), counts=sizes).wait()
        parts = [part.view(shape) for part, shape in zip(torch.split(target, sizes), shapes, strict=True)]
        return torch.cat(parts, dim)

    def scatter_sum(self, tensor: torch.Tensor, counts: Sequence[int], dim: int) -> torch.Tensor:
        """Return this rank's `counts[rank]` elements along `dim` of the sum over all ranks."""
        parts = torch.split(tensor, list(counts), dim)
        source = torch.cat([part.reshape(-1) for part in parts])
        target = tensor.new_empty(parts[self.rank].shape)
        sizes = [part.numel() for part in parts]
        self._on(tensor).reducescatter(buffer_of(source), buffer_of(target), counts=sizes).wait()
        return target

    def part(self, tensor: torch.Tensor, counts: Sequence[int], dim: int) -> torch.Tensor:
        """Return this rank's `counts[rank]` elements along `dim`, contiguous."""
        return tensor.narrow(dim, sum(counts[: self.rank]), counts[self.rank]).contiguous()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank the contiguous tensor of the first."""
        self._on(tensor).broadcast(buffer_of(tensor), root=0).wait()

    # The conjugate pairs. Where no gradient is needs_gradients, only the forward half is left of each.

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, the same on all ranks; its gradient is the sum over all ranks (Megatron's f)."""
        if not needs_gradients(x):
            return x
        return self._once(x, lambda: apply(x, lambda value: value.view_as(value), self._last(self.sum)))

    def summed_gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter; its gradient is the sum over all ranks, each of which has used it on other tokens."""
        return apply(parameter, lambda value: value.view_as(value), self.sum)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over all ranks; its gradient is that of the sum (Megatron's g)."""
        return apply(x, self.sum, lambda gradient: gradient)

    def gathered(self, x: torch.Tensor, counts: Sequence[int], dim: int = -1) -> torch.Tensor:
        """Return the parts of all ranks, as input of identical computations; the gradient is this rank's part."""
        return apply(
            x,
            lambda value: self.gather(value, counts, dim),
            lambda gradient: self.part(gradient, counts, dim),
        )

    def split(self, x: torch.Tensor, counts: Sequence[int], dim: int = -1) -> torch.Tensor:
        """Return this rank's part of `x`, the same on all ranks; the gradient is gathered."""
        return apply(
            x,
            lambda value: self.part(value, counts, dim),
            lambda gradient: self.gather(gradient, counts, dim),
        )

    def enter_sequence(self, x: torch.Tensor, counts: Sequence[int], dim: int) -> torch.Tensor:
        """Return the parts of all ranks; the gradient is this rank's part of the sum over all ranks."""
        return self._once(
            x,
            lambda: apply(
                x,
                lambda value: self.gather(value, counts, dim),
                self._last(lambda gradient: self.scatter_sum(gradient, counts, dim)),
            ),
        )

    def leave_sequence(self, x: torch.Tensor, counts: Sequence[int], dim: int) -> torch.Tensor:
        """Return this rank's part of the sum of `x` over all ranks; the gradient is gathered."""
        return apply(
            x,
            lambda value: self.scatter_sum(value, counts, dim),
            lambda gradient: self.gather(gradient, counts, dim),
        )

    def _on(self, tensor: torch.Tensor) -> Communicator:
        return self._communicators[memory_kind(tensor).partition(":")[0]]

    def _last(self, conjugate: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function of gradients after which no layer enters again with what entered last.

        It would keep the graph of that tensor, which Python's collector does not see, and which keeps this object.
        """

        def run(gradient: torch.Tensor) -> torch.Tensor:
            self._last_entered = None
            return conjugate(gradient)

        return run

    def _once(self, x: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return `make()`, or its last result if `x` is the same: layers with the same input need one exchange."""
        shared = self._last_entered
        if shared is not None and shared.is_of(x):
            return shared.result
        made = make()

        def forget(gone: weakref.ref[torch.Tensor]) -> None:
            if self._last_entered is not None and self._last_entered.x is gone:
                self._last_entered = None

        self._last_entered = _Entered(weakref.ref(x, forget), _state(x), made)
        return made


def apply(x: torch.Tensor, run: Callable[..., torch.Tensor], conjugate: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return `run(x)`; the gradient of each function is the other. Of a sequence that is divided, on its rows here."""
    return inside(x, lambda value: apply_pair(value, run, conjugate))


class _Entered(NamedTuple):
    """The result for the last tensor that entered; kept as long as that tensor is in use.

    (Autograd keeps the memory of the result, not the object, so a weak reference to it would be dead.)
    """

    x: weakref.ref[torch.Tensor]
    state: tuple[int, bool]
    result: torch.Tensor

    def is_of(self, x: torch.Tensor) -> bool:
        """Return whether the result is of this tensor as it is now."""
        return self.x() is x and self.state == _state(x)


def _state(x: torch.Tensor) -> tuple[int, bool]:
    return x._version, torch.is_grad_enabled()


def _resized(shape: torch.Size, dim: int, count: int) -> torch.Size:
    sizes = list(shape)
    sizes[dim] = count
    return torch.Size(sizes)
