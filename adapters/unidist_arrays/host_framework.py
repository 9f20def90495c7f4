"""The arithmetic of `Framework` on host memory: what is the same for every framework whose memory numpy can use."""

from __future__ import annotations

import ctypes

from typing_extensions import override

from unidist.algorithms import reduce_into
from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import ReduceOp
from unidist.errors import UsageError
from unidist.framework import Framework

__all__ = ["HostFramework"]


class HostFramework(Framework):
    """Host memory with numpy; a framework adds its tensors and models. numpy is imported when memory is handled."""

    @override
    def allocate(self, count: int, dtype: DType, memory: str) -> Buffer:
        if memory != HOST:
            raise UsageError(
                f"{self.name} gives no memory of kind {memory!r} that could be written to; choices: {HOST}"
            )
        from unidist_arrays.memory import NUMPY_DTYPES, buffer_of_array, empty_array

        buffer = buffer_of_array(empty_array((count,), NUMPY_DTYPES[dtype]))
        self.zero(buffer)
        return buffer

    @override
    def zero(self, buffer: Buffer) -> None:
        ctypes.memset(buffer.address, 0, buffer.nbytes)

    @override
    def multiply(self, buffer: Buffer, factor: float) -> None:
        from unidist_arrays.memory import array_of_buffer

        array = array_of_buffer(buffer)
        array *= array.dtype.type(factor)

    @override
    def add(self, source: Buffer, target: Buffer) -> None:
        reduce_into(target, source, ReduceOp.SUM)

    @override
    def convert(self, source: Buffer, target: Buffer) -> None:
        import numpy as np

        from unidist_arrays.memory import array_of_buffer

        with np.errstate(over="ignore"):  # too large for the target: infinite, as it shall be
            array_of_buffer(target)[:] = array_of_buffer(source)

    @override
    def norm(self, buffer: Buffer, order: float) -> float:
        from unidist_arrays.arithmetic import norm

        return norm(buffer, order)

    @override
    def clamp(self, buffer: Buffer, limit: float) -> None:
        from unidist_arrays.arithmetic import clamp

        clamp(buffer, limit)
