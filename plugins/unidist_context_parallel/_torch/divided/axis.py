"""Communication among the ranks that have the tokens of one batch, as autograd functions.

Backward passes are the exact transposes: of a sum over the ranks a sum, of a gather a reduce-scatter. Then the
gradients of all ranks' losses, which are equal, are averaged over the ranks as in data parallelism: what a rank
computes is its part of N times the gradient.

Every rank does the same operations in the same order, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

import torch

from unidist.communicator import MessageOrder, ReduceOp
from unidist.runtime import context
from unidist_context_parallel.layout.sequence import AXIS
from unidist_torch.memory import buffer_of, memory_kind
from unidist_torch.operations.communicators import allreduced
from unidist_torch.operations.differentiable import apply, check_once

if TYPE_CHECKING:
    from unidist.communicator import Communicator, Work
    from unidist.runtime_api import RuntimeAPI
    from unidist_context_parallel.layout.sequence import SequenceLayout


class ContextAxis:
    """The ranks that have the tokens of one batch, as seen by one of them. A runtime has one.

    Args:
        runtime: the runtime.

    Attributes:
        rank: of this rank on the axis.
        size: ranks on the axis.
        exchange: how attention gets the keys and values of other ranks, see `ContextParallel`.
    """

    exchange = "ring"

    def __init__(self, runtime: RuntimeAPI) -> None:
        self.rank = runtime.axis_rank(AXIS)
        self.size = runtime.axis_size(AXIS)
        self._runtime = runtime
        self._communicators: dict[str, Communicator] = {}
        self._variants: dict[str, ContextAxis] = {self.exchange: self}

    def prepare(self, kinds: Iterable[str]) -> None:
        """Make the communicators for these kinds of memory. Collective over all ranks."""
        for kind in sorted({"host", *kinds}):
            if kind not in self._communicators:
                self._communicators[kind] = self._runtime.new_communicator(AXIS, memory=kind)

    def using(self, exchange: str) -> ContextAxis:
        """Return the same axis for a model whose attention exchanges in another way."""
        if exchange == self.exchange:
            return self
        if exchange not in self._variants:
            other = self._variants[exchange] = object.__new__(ContextAxis)
            other.__dict__ = {**self.__dict__, "exchange": exchange}
        return self._variants[exchange]

    def close(self) -> None:
        """See `unidist.runtime_api.Owned`: the runtime closes the communicators."""

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        return current_axis, (self.exchange,)

    @property
    def is_first_rank(self) -> bool:
        """Whether this is rank 0 of the job, which says things once."""
        return self._runtime.topology.rank == 0

    # Without gradients

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, a new tensor."""
        return allreduced(self._on(tensor), tensor)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum over all ranks, a new tensor."""
        return allreduced(self._on(tensor), tensor, ReduceOp.MAX)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank the contiguous tensor of the first."""
        self._on(tensor).broadcast(buffer_of(tensor), root=0).wait()

    def gather(self, local: torch.Tensor, layout: SequenceLayout, dim: int) -> torch.Tensor:
        """Return the rows of all ranks along `dim`, in their order."""
        rows = local.movedim(dim, 0).contiguous()
        target = rows.new_empty((layout.size, *rows.shape[1:]))
        width = rows[0:1].numel() if len(rows) else target[0:1].numel()
        if target.numel():
            counts = [count * width for count in layout.counts]
            self._on(local).allgather(buffer_of(rows), buffer_of(target), counts=counts).wait()
        if (layout.owner[1:] < layout.owner[:-1]).any():
            target = target.index_select(0, torch.from_numpy(layout.gathered_order()).to(local.device))
        return target.movedim(0, dim).contiguous()

    def scatter_sum(self, whole: torch.Tensor, layout: SequenceLayout, dim: int) -> torch.Tensor:
        """Return this rank's rows of the sum over all ranks."""
        rows = whole.movedim(dim, 0)
        source = torch.cat([take_rows(rows, layout, 0, rank) for rank in range(self.size)])
        target = source.new_empty((layout.counts[self.rank], *source.shape[1:]))
        if source.numel():
            width = source[0:1].numel()
            counts = [count * width for count in layout.counts]
            self._on(whole).reducescatter(buffer_of(source), buffer_of(target), counts=counts).wait()
        return target.movedim(0, dim)

    def alltoall(self, source: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send pieces of a flat tensor to all ranks, and return what they have sent to this one, flat."""
        target = source.new_empty(sum(received))
        work = self._on(source).alltoall(
            buffer_of(source), buffer_of(target), send_counts=sent, receive_counts=received
        )
        work.wait()
        return target

    def start_shift(self, source: torch.Tensor, target: torch.Tensor) -> list[Work]:
        """Send a contiguous tensor to the next rank, and receive that of the rank before into `target`."""
        communicator = self._on(source)
        if communicator.capabilities.messages is not MessageOrder.ANY:  # all ranks send at once
            sent, received = [0] * self.size, [0] * self.size
            sent[(self.rank + 1) % self.size] = source.numel()
            received[(self.rank - 1) % self.size] = target.numel()
            return [
                communicator.alltoall(buffer_of(source), buffer_of(target), send_counts=sent, receive_counts=received)
            ]
        works = []
        if source.numel():
            works.append(communicator.send(buffer_of(source), to=(self.rank + 1) % self.size))
        if target.numel():
            works.append(communicator.recv(buffer_of(target), source=(self.rank - 1) % self.size))
        return works

    # With gradients

    def summed(self, local: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        return apply_once(local, self.sum, self.sum)

    def gathered(self, local: torch.Tensor, layout: SequenceLayout, dim: int) -> torch.Tensor:
        """Return the rows of all ranks along `dim`, in their order."""
        return apply_once(
            local,
            lambda value: self.gather(value, layout, dim),
            lambda gradient: self.scatter_sum(gradient, layout, dim),
        )

    def _on(self, tensor: torch.Tensor) -> Communicator:
        kind = memory_kind(tensor).partition(":")[0]
        if kind not in self._communicators:
            self._communicators[kind] = self._runtime.new_communicator(AXIS, memory=kind)
        return self._communicators[kind]


def current_axis(exchange: str = "ring") -> ContextAxis:
    """Return the axis of this process's runtime."""
    return context.current().owned(ContextAxis).using(exchange)


def apply_once(
    x: torch.Tensor, run: Callable[..., torch.Tensor], transpose: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Return `run(x)`, with `transpose` for its gradient, which has none itself.

    A script that differentiates a gradient has seen that gradient, and here it is this rank's part of N times it.
    """

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        check_once("context")
        return transpose(gradient)

    return apply(x, run, backward)


def take_rows(whole: torch.Tensor, layout: SequenceLayout, dim: int, rank: int) -> torch.Tensor:
    """Return a rank's rows of a tensor along `dim`. Differentiable."""
    runs = layout.runs(rank)
    if len(runs) == 1:
        ((start, end),) = runs
        return whole if end - start == layout.size else whole.narrow(dim, start, end - start)
    if not runs:
        return whole.narrow(dim, 0, 0)
    if len(runs) <= 4:
        return torch.cat([whole.narrow(dim, start, end - start) for start, end in runs], dim)
    return whole.index_select(dim, positions_of(layout, rank, whole.device))


def positions_of(layout: SequenceLayout, rank: int, device: torch.device) -> torch.Tensor:
    """Return the rows of a rank, ascending, as a tensor."""
    return layout.derived(("tensor", rank, device), lambda: torch.from_numpy(layout.positions(rank)).to(device))
