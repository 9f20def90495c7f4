"""Arithmetic on flat memory with numpy, chunk by chunk, so that nothing as large as the memory is made."""

from __future__ import annotations

import math

import numpy as np

from unidist.buffer import Buffer
from unidist_arrays.memory import Array, array_of_buffer

__all__ = ["clamp", "norm"]

_CHUNK = 2**16
"""Elements that are widened at a time: they stay in the cache."""


def norm(buffer: Buffer, order: float) -> float:
    """Return the norm of this order of a buffer, see `Framework.norm`."""
    array = array_of_buffer(buffer)
    parts = np.array([_norm(array[start : start + _CHUNK], order) for start in range(0, array.size, _CHUNK)])
    return _norm(parts, order)


def clamp(buffer: Buffer, limit: float) -> None:
    """Clamp a buffer in place to [-limit, limit], see `Framework.clamp`."""
    array = array_of_buffer(buffer)
    with np.errstate(over="ignore"):
        bound = array.dtype.type(limit)  # infinite where the type does not reach so far
    np.clip(array, -bound, bound, out=array)


def _norm(array: Array, order: float) -> float:
    if order == 2 and array.dtype == np.float32:  # squares fit and add up well enough in a chunk, and need no copy
        with np.errstate(over="ignore", invalid="ignore"):
            total = float(np.dot(array, array))
        if math.isfinite(total):
            return math.sqrt(total)
    values = np.abs(array) if array.dtype.kind == "c" or order != 2 else array
    values = values.astype(np.float64, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):  # overflows are what callers look for
        if math.isinf(order):
            return float(np.max(values))
        if order == 2:
            return math.sqrt(float(np.dot(values, values)))
        return float(np.sum(values if order == 1 else values**order) ** (1.0 / order))
