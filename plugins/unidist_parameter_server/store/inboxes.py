"""Gradients of all workers in memory that each of them maps."""

from __future__ import annotations

from typing import Any

import numpy as np

from unidist.buffer import Buffer, DType
from unidist.communicator_capabilities import SharesMemory

Array = np.ndarray[Any, np.dtype[Any]]

_ALIGNMENT = 4096


class Inboxes:
    """Flat memory of the gradients of each worker.

    Args:
        communicator: over the workers; needed for `allocate` alone.
        worker: this one.
        num_workers: of all.

    Attributes:
        arrays: for each worker one array for each flat memory.
    """

    def __init__(self, communicator: SharesMemory, worker: int, num_workers: int) -> None:
        self._communicator = communicator
        self._worker = worker
        self._owners: list[Buffer] = []
        self.arrays: list[list[Array]] = [[] for _ in range(num_workers)]

    def allocate(self, count: int, dtype: DType, memory: str) -> Buffer:
        """Return zeroed elements of this worker, which the others map too. Collective."""
        nbytes = count * dtype.itemsize
        stride = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        shared = self._communicator.allocate_shared(stride * len(self.arrays)).shared
        self._owners.append(shared)
        for worker, arrays in enumerate(self.arrays):
            begin = worker * stride
            arrays.append(np.frombuffer(shared.bytes()[begin : begin + nbytes], dtype.value))
        return shared.slice(self._worker * stride, nbytes).cast(dtype)
