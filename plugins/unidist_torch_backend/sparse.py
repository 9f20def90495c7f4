"""The sum of sparse tensors: indices and values of all ranks are gathered, and added up on each."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from unidist.communicator import Communicator, Work
from unidist.errors import UsageError
from unidist_torch_backend.tensors import buffer, reducible


def start(communicator: Communicator, tensor: torch.Tensor, op: Any, timeout: timedelta) -> Work:
    """Begin to sum a sparse COO tensor over the ranks, in place.

    Returns:
        Work that gathers indices and values in its `wait`: how many there are is known only when every rank has told.

    Raises:
        UsageError: the reduction is not SUM.
    """
    if getattr(op, "op", op) != dist.ReduceOp.SUM:
        raise UsageError("allreduce by backend unidist: sparse tensors are summed; choices: SUM")
    reducible(tensor, "allreduce")
    return _SparseSum(communicator, tensor)


class _SparseSum(Work):
    def __init__(self, communicator: Communicator, tensor: torch.Tensor) -> None:
        self._communicator = communicator
        self._tensor = tensor
        own = tensor.detach().coalesce()
        self._indices = own.indices().t().contiguous()  # (nnz, sparse dims)
        self._values = own.values().contiguous()  # (nnz, dense dims)
        self._own_count = torch.tensor([len(self._values)])
        self._counts = torch.zeros(communicator.size, dtype=torch.int64)
        communicator.allgather(buffer(self._own_count), buffer(self._counts)).wait()
        self._works = self._gather()

    def _gather(self) -> list[Work]:
        counts = self._counts.tolist()
        total = sum(counts)
        self._all_indices = self._indices.new_empty((total, self._indices.size(1)))
        self._all_values = self._values.new_empty((total, *self._values.shape[1:]))
        works = []
        for source, target in ((self._indices, self._all_indices), (self._values, self._all_values)):
            width = target[0].numel() if total else 0
            works.append(
                self._communicator.allgather(buffer(source), buffer(target), counts=[n * width for n in counts])
            )
        return works

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        for work in self._works:
            work.wait(timeout)
        total = torch.sparse_coo_tensor(
            self._all_indices.t(), self._all_values, self._tensor.shape, check_invariants=False
        ).coalesce()
        with torch.no_grad():
            self._tensor.copy_(total)

    @override
    def done(self) -> bool:
        return all(work.done() for work in self._works)
