"""The adapter of numpy: arrays in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unidist.buffer import Buffer, DType
from unidist.errors import UsageError
from unidist_arrays.host_framework import HostFramework
from unidist_arrays.memory import array_of_buffer
from unidist_second.models import Model

Array = npt.NDArray[Any]


class NumpyFramework(HostFramework):
    """numpy for the core, which has the arithmetic of host memory."""

    name = "numpy"

    def is_tensor(self, value: object) -> bool:
        """Return whether it is an array."""
        return isinstance(value, np.ndarray)

    def is_model(self, value: object) -> bool:
        """Return whether it is a `Model`."""
        return isinstance(value, Model)

    def buffer(self, tensor: Array) -> Buffer:
        """Return the array's memory; UsageError if it has gaps or another order."""
        if not tensor.flags.c_contiguous:
            raise UsageError(f"an array of shape {tensor.shape} and strides {tensor.strides} has gaps; copy it")
        return Buffer(tensor.ctypes.data, tensor.size, self.dtype(tensor), tensor)

    def store(self, tensor: Array, buffer: Buffer) -> None:
        """Give the array the elements of the buffer."""
        tensor[...] = array_of_buffer(buffer, tensor.shape)

    def tensor(self, buffer: Buffer, shape: Sequence[int]) -> Array:
        """Return an array over the buffer's memory."""
        return array_of_buffer(buffer, shape)

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
