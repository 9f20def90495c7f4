"""The adapter of numpy: arrays in host memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unidist.buffer import HOST, Buffer, DType
from unidist.errors import UsageError
from unidist.framework import Framework
from unidist_second.models import Model

Array = npt.NDArray[Any]


class NumpyFramework(Framework):
    """numpy for the core. It has no bfloat16."""

    name = "numpy"

    def is_tensor(self, value: object) -> bool:
        """Say whether it is an array."""
        return isinstance(value, np.ndarray)

    def is_model(self, value: object) -> bool:
        """Say whether it is a `Model`."""
        return isinstance(value, Model)

    def buffer(self, tensor: Array) -> Buffer:
        """Return the array's memory; UsageError if it has gaps or another order."""
        if not tensor.flags.c_contiguous:
            raise UsageError(f"an array of shape {tensor.shape} and strides {tensor.strides} has gaps; copy it")
        return Buffer(tensor.ctypes.data, tensor.size, self.dtype(tensor), tensor)

    def tensor(self, buffer: Buffer, shape: Sequence[int]) -> Array:
        """Return an array over the buffer's memory."""
        return array_of(buffer).reshape(shape)

    def allocate(self, count: int, dtype: DType, memory: str) -> Buffer:
        """Return zeroed host memory."""
        if memory != HOST:
            raise UsageError(f"numpy has no memory of kind {memory!r}; choices: {HOST}")
        return self.buffer(np.zeros(count, _numpy_type(dtype)))

    def zero(self, buffer: Buffer) -> None:
        """Set every element to zero."""
        array_of(buffer)[:] = 0

    def multiply(self, buffer: Buffer, factor: float) -> None:
        """Multiply every element, in place."""
        array = array_of(buffer)
        array *= array.dtype.type(factor)

    def add(self, source: Buffer, target: Buffer) -> None:
        """Add the source to the target."""
        array = array_of(target)
        array += array_of(source)

    def convert(self, source: Buffer, target: Buffer) -> None:
        """Write the source to the target, rounded."""
        with np.errstate(over="ignore"):
            array_of(target)[:] = array_of(source)

    def norm(self, buffer: Buffer, order: float) -> float:
        """Return the norm, of numbers that are divided by the largest first: their powers cannot overflow."""
        magnitudes = np.abs(array_of(buffer)).astype(np.float64)
        largest = float(magnitudes.max())
        if math.isinf(order) or not math.isfinite(largest) or largest == 0.0:
            return largest
        return largest * float(((magnitudes / largest) ** order).sum() ** (1 / order))

    def clamp(self, buffer: Buffer, limit: float) -> None:
        """Move every element into [-limit, limit]."""
        array = array_of(buffer)
        bound = min(limit, float(np.finfo(array.dtype).max))
        np.clip(array, -bound, bound, out=array) if limit == bound else None

    def dtype(self, tensor: Array) -> DType:
        """Return the array's element type."""
        try:
            return DType(tensor.dtype.name)
        except ValueError:
            raise UsageError(f"arrays of {tensor.dtype} cannot be exchanged; choices: {', '.join(DType)}") from None

    def parameters(self, model: Model) -> Mapping[str, Array]:
        """Return the trained arrays by name."""
        return {name: array for name, array in model.arrays.items() if name not in model.frozen}

    def model_state(self, model: Model) -> Mapping[str, Array]:
        """Return all arrays by name."""
        return model.arrays


def array_of(buffer: Buffer) -> Array:
    """Return an array over host memory, which it keeps alive."""
    dtype = _numpy_type(buffer.dtype)
    if not buffer.count:
        return np.empty(0, dtype)
    memory = (ctypes.c_char * buffer.nbytes).from_address(buffer.address)
    memory.owner = buffer.owner  # type: ignore[attr-defined]  # the array keeps `memory`, `memory` the owner
    return np.frombuffer(memory, dtype)  # type: ignore[call-overload, no-any-return]  # it takes any buffer


def _numpy_type(dtype: DType) -> np.dtype[Any]:
    if dtype is DType.BFLOAT16:
        raise UsageError("numpy has no bfloat16; use float16 or float32")
    return np.dtype(dtype.value)
