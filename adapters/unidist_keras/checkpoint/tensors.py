"""Keras variables as pieces of a checkpoint, and filled from one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from unidist.buffer import Buffer, DType
from unidist.checkpoint.format.interface import SavedSection
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, TensorInfo
from unidist.errors import UsageError
from unidist_arrays.memory import NUMPY_DTYPES, Array, array_of_buffer, buffer_of_array, empty_array


def dtype_of(tensor: Any) -> DType:
    """Return the element type of a variable or tensor, or raise UsageError for one without a counterpart (string)."""
    try:
        return DType(keras.backend.standardize_dtype(tensor.dtype))
    except ValueError:
        raise UsageError(f"tensors of {tensor.dtype} cannot be saved; choices: {', '.join(DType)}") from None


def piece_of(info: TensorInfo, part: Part, tensor: Any) -> Piece:
    """Return a variable or tensor of this rank as a piece; it is copied when this rank writes it."""

    def copied() -> Buffer:
        array = np.asarray(tensor)  # of a variable it may be a view of memory that the next update changes
        return buffer_of_array(np.array(array, NUMPY_DTYPES[info.dtype], order="C").reshape(tuple(tensor.shape)))

    return Piece(info, part, copied)


def read_into(section: SavedSection, name: str, part: Part, variable: Any, *, factor: float = 1.0) -> None:
    """Read part of a saved tensor, times a factor, into a variable of this rank."""
    array = empty_array(tuple(variable.shape), NUMPY_DTYPES[dtype_of(variable)])
    section.read(name, part, buffer_of_array(array))
    if factor != 1.0:
        array *= array.dtype.type(factor)
    variable.assign(array)


def whole_weights(found: tuple[Mapping[str, tuple[TensorInfo, Buffer]], Any] | None) -> dict[str, Array] | None:
    """Return the weights that `redistribute_job` has brought to this rank as arrays by path, None if it has none."""
    if found is None:
        return None
    return {name: array_of_buffer(memory, info.shape) for name, (info, memory) in found[0].items()}
