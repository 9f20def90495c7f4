"""Sparse gradients (embeddings): gathered instead of reduced, summed where rows meet; or exchanged as dense ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unidist.buffer import Buffer
from unidist.communicator import Communicator
from unidist.gradients.interface import ReducedGradients
from unidist.negotiation.objects import gather_objects
from unidist_torch.gradients.placeholder import ShardedGradient
from unidist_torch.memory import buffer_of


class SparseGradients:
    """The sparse gradients of one optimizer.

    That a parameter's gradient is sparse shows at its first backward pass, maybe on one rank only; the ranks then
    agree on it, and exchange it by this class from that update on.

    Args:
        communicator: over the ranks that exchange gradients, for this object's own use.
        as_dense: the gradients travel in the buckets of the dense ones; here they only become sparse again.
    """

    def __init__(self, communicator: Communicator, *, as_dense: bool = False) -> None:
        self.members = communicator.members
        self.as_dense = as_dense
        self._communicator = communicator
        self._agreed: list[int] = []
        self._pending: dict[int, list[torch.Tensor]] = {}

    def agreed(self, index: int) -> bool:
        """Return whether all ranks know that parameter `index` has sparse gradients."""
        return index in self._agreed

    def agree(self, index: int) -> None:
        """Exchange parameter `index` here from now on. Called on every rank in the same order."""
        if index not in self._agreed:
            self._agreed.append(index)

    def pending(self, index: int) -> bool:
        """Return whether this rank has a sparse gradient of parameter `index`."""
        return index in self._pending

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Keep a gradient of this rank until the exchange; several are summed."""
        self._pending.setdefault(index, []).append(gradient.detach())

    def densify(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient of this rank as a dense one, and note that it was sparse."""
        self._pending.setdefault(index, [])
        return gradient.to_dense()

    def clear(self) -> None:
        """Drop what was added."""
        self._pending.clear()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. Collective."""
        return gather_objects(self._communicator, value)

    def exchange(self, parameters: Sequence[torch.Tensor], *, scale: float) -> None:
        """Give every agreed parameter `scale` times the sum over all ranks, and drop what was added.

        The new gradient is sparse and coalesced. Collective.
        """
        if self.as_dense:
            return
        for index in self._agreed:
            parameter = parameters[index]
            total = self._exchange_one(parameter, self._pending.get(index, []), scale)
            parameter.grad = total if total._nnz() or self._pending.get(index) else None
        self._pending.clear()  # the next backward pass adds to `parameter.grad`, which holds all of this one

    def reduced(self, parameters: Sequence[torch.Tensor]) -> list[ReducedGradients]:
        """Return the values that `exchange` left, each row once, to be changed in place."""
        if self.as_dense:
            return []  # they are in the buckets
        values = [
            buffer_of(gradient._values().view(-1))
            for gradient in (parameters[index].grad for index in self._agreed)
            if gradient is not None and gradient._nnz()
        ]
        return [ReducedGradients(tuple(values))] if values else []

    def make_sparse(self, parameters: Sequence[torch.Tensor]) -> None:
        """Give every agreed parameter a sparse gradient, of the rows that are not zero, if dense ones travelled.

        After `Update.conclude`, which changes what the buckets hold.
        """
        if not self.as_dense:
            return
        for index in self._agreed:
            gradient = parameters[index].grad
            if gradient is not None and gradient.layout is torch.strided and not isinstance(gradient, ShardedGradient):
                parameters[index].grad = gradient.to_sparse(1)
        self._pending.clear()

    def _exchange_one(self, parameter: torch.Tensor, gradients: list[torch.Tensor], scale: float) -> torch.Tensor:
        shape = tuple(parameter.shape)
        if gradients:
            own = gradients[0] if len(gradients) == 1 else sum(gradients[1:], gradients[0])
            own = own.coalesce()
        else:
            own = torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64), torch.empty((0, *shape[1:]), dtype=parameter.dtype), shape
            ).coalesce()
        rows = own.indices()[0].cpu().contiguous()
        values = own.values().cpu().contiguous()
        counts = self._gather(torch.tensor([rows.numel()]), [1] * self._communicator.size).tolist()
        width = values[0].numel() if values.numel() else max(1, parameter[0].numel())
        all_rows = self._gather(rows, counts)
        all_values = self._gather(values.reshape(-1), [count * width for count in counts])
        all_values = all_values.reshape(sum(counts), *shape[1:]) * scale
        total = torch.sparse_coo_tensor(all_rows[None], all_values, shape).coalesce()
        return total.to(parameter.device)

    def _gather(self, tensor: torch.Tensor, counts: list[int]) -> torch.Tensor:
        target = torch.empty(sum(counts), dtype=tensor.dtype)
        source: Buffer = buffer_of(tensor)
        self._communicator.allgather(source, buffer_of(target), counts=counts).wait()
        return target
