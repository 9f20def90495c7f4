"""Comparison of the inputs of ranks that compute one batch together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from typing_extensions import override

from unidist.communicator import Communicator, ReduceOp
from unidist.errors import UsageError
from unidist_arrays.memory import Array, buffer_of_array
from unidist_jax.compiled import HostOperation, ShapeDtype
from unidist_jax.optimizer import Cell


class EqualInputs(HostOperation):
    """Raises UsageError on every rank if they were given different arrays, the first time that it runs. Collective.

    Args:
        cell: a communicator along the axis.
        axis: its name, for the error.
    """

    can_be_batched: ClassVar[bool] = False

    def __init__(self, cell: Cell[Communicator], axis: str) -> None:
        self._cell, self._axis = cell, axis
        self._was_checked = False

    @property
    @override
    def title(self) -> str:
        return f"the comparison of inputs over the axis {self._axis!r}"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return [ShapeDtype((), np.dtype(bool))]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        results[0][...] = True
        if self._was_checked:
            return
        self._was_checked = True
        digest = hashlib.blake2b(digest_size=6)
        for array in operands:
            digest.update(f"{array.shape} {array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        number = float(int.from_bytes(digest.digest(), "little"))  # 48 bits: exact in float64
        largest = np.array([number, -number])
        communicator = self._cell.value
        communicator.allreduce(buffer_of_array(largest), buffer_of_array(largest), op=ReduceOp.MAX).wait()
        if largest[0] != -largest[1]:
            raise UsageError(
                f"the {communicator.size} ranks along the axis {self._axis} compute one batch together, and got "
                f"different inputs (this is rank {communicator.rank} of them). Give them the same: divide the data by "
                "ud.shard(...), or by ud.data_rank() and ud.data_size(), and draw random keys from ud.seed(n)"
            )
