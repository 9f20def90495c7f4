"""Sparse gradients (embeddings): gathered instead of reduced, summed where rows meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unidist.buffer import Buffer
from unidist.communicator import Communicator
from unidist.context import Context
from unidist.mesh import DATA_AXIS
from unidist.objects import gather_objects
from unidist_torch.memory import buffer_of


class SparseGradients:
    """The sparse gradients of one optimizer.

    That a parameter's gradient is sparse shows at its first backward pass, maybe on one rank only; the ranks then
    agree on it, and exchange it by this class from that update on.

    Args:
        context: the runtime.
    """

    def __init__(self, context: Context) -> None:
        self._communicator: Communicator = context.new_communicator(DATA_AXIS)
        self._agreed: list[int] = []
        self._pending: dict[int, list[torch.Tensor]] = {}

    def agreed(self, index: int) -> bool:
        """Say whether all ranks know that parameter `index` has sparse gradients."""
        return index in self._agreed

    def agree(self, index: int) -> None:
        """Exchange parameter `index` here from now on. Called on every rank in the same order."""
        if index not in self._agreed:
            self._agreed.append(index)

    def pending(self, index: int) -> bool:
        """Say whether this rank has a sparse gradient of parameter `index`."""
        return index in self._pending

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Keep a gradient of this rank until the exchange; several are summed."""
        self._pending.setdefault(index, []).append(gradient.detach())

    def clear(self) -> None:
        """Forget what was added."""
        self._pending.clear()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks of the data axis. Collective."""
        return gather_objects(self._communicator, value)

    def exchange(self, parameters: Sequence[torch.Tensor], *, scale: float) -> None:
        """Give every agreed parameter `scale` times the sum over all ranks, and forget what was added.

        The new gradient is sparse and coalesced. Collective.
        """
        for index in self._agreed:
            parameter = parameters[index]
            total = self._exchange_one(parameter, self._pending.get(index, []), scale)
            parameter.grad = total if total._nnz() or self._pending.get(index) else None
        self._pending.clear()  # the next backward pass adds to `parameter.grad`, which holds all of this one

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
