"""Numbers for tests: every element type as a numpy array, and what a reduction of it must give.

numpy has no bfloat16: such arrays are kept as their 16 bits, in uint16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp

Array = npt.NDArray[Any]

_EXPONENT_AND_MANTISSA_BITS = {DType.FLOAT16: 11, DType.BFLOAT16: 8, DType.FLOAT32: 24, DType.FLOAT64: 53}
_TRUTH = {
    ReduceOp.SUM: np.logical_or,
    ReduceOp.MAX: np.logical_or,
    ReduceOp.PRODUCT: np.logical_and,
    ReduceOp.MIN: np.logical_and,
}
_NUMBERS = {ReduceOp.SUM: np.add, ReduceOp.PRODUCT: np.multiply, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}


def storage(dtype: DType) -> np.dtype[Any]:
    """Return numpy's type for the memory of `dtype`."""
    return np.dtype("uint16" if dtype is DType.BFLOAT16 else dtype.value)


def buffer_of(array: Array, dtype: DType) -> Buffer:
    """Return a buffer over an array of `storage(dtype)`, without a copy."""
    return Buffer.of(array).cast(dtype)


def array_of(buffer: Buffer) -> Array:
    """Return an array over the buffer's memory, without a copy; it keeps the buffer's owner alive."""
    if not buffer.count:
        return np.empty(0, storage(buffer.dtype))
    memory = (ctypes.c_char * buffer.nbytes).from_address(buffer.address)
    memory.unidist_owner = buffer.owner  # type: ignore[attr-defined]  # the array keeps `memory`, `memory` the owner
    array: Array = np.frombuffer(memory, dtype=storage(buffer.dtype))  # type: ignore[call-overload]  # it takes any buffer
    return array


def encode(values: Array, dtype: DType) -> Array:
    """Return numbers as an array of `storage(dtype)`, rounded to nearest even."""
    if dtype is not DType.BFLOAT16:
        return np.ascontiguousarray(values.astype(storage(dtype)))
    wide = values.astype(np.float32)
    bits = wide.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(wide), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def decode(array: Array, dtype: DType) -> Array:
    """Return the numbers in an array of `storage(dtype)`: 16-bit floats as float32, all else as it is."""
    if dtype is DType.BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if dtype is DType.FLOAT16 else array


def exact_values(rng: np.random.Generator, count: int, dtype: DType, op: ReduceOp) -> Array:
    """Return small whole numbers, as `storage(dtype)`: with up to 8 ranks, no order of reducing them rounds."""
    if dtype is DType.BOOL:
        return rng.integers(0, 2, count).astype(np.bool_)
    unsigned = storage(dtype).kind == "u" and dtype is not DType.BFLOAT16
    if op is ReduceOp.PRODUCT:
        values = rng.choice([1, 2, 3] if unsigned else [1, 2, -1, -2], count)
    else:
        values = rng.integers(0 if unsigned else -8, 16, count)
    if dtype.is_complex:
        values = values + 1j * (0 if op is ReduceOp.PRODUCT else rng.integers(-8, 16, count))
    return encode(np.asarray(values), dtype)


def reduced(arrays: Sequence[Array], dtype: DType, op: ReduceOp, scale: float) -> Array:
    """Return `scale` times the reduction of one array per rank, as the contract of `Communicator.allreduce` says."""
    with np.errstate(all="ignore"):
        if dtype is DType.BOOL:
            return np.asarray(_TRUTH[op].reduce(arrays)).astype(np.bool_)
        if dtype.is_floating:
            exact = _NUMBERS[op].reduce([decode(array, dtype).astype(np.float64) for array in arrays])
            return encode(exact * scale, dtype)
        total = _NUMBERS[op].reduce(arrays, dtype=storage(dtype))
        if scale == 1.0:
            return np.asarray(total)
        if dtype.is_complex:
            return np.asarray(total * scale).astype(storage(dtype))
        divisor = round(1.0 / scale)
        wide = total.astype(np.float64)
        scaled: Array = wide / divisor if divisor and 1.0 / divisor == scale else wide * scale
        truncated: Array = np.trunc(scaled).astype(storage(dtype))
        return truncated


def difference(found: Array, expected: Array, dtype: DType, *, ulps: float = 0.0) -> str:
    """Return "" if two arrays of `storage(dtype)` are equal, else where they first differ.

    Args:
        found: what came out.
        expected: what it should be; NaN equals NaN.
        dtype: of the elements.
        ulps: how many units in the last place floating-point elements may differ.
    """
    if found.shape != expected.shape:
        return f"shape {found.shape} instead of {expected.shape}"
    if ulps and (dtype.is_floating or dtype.is_complex):
        bits = _EXPONENT_AND_MANTISSA_BITS.get(dtype, 24 if dtype is DType.COMPLEX64 else 53)
        a, b = decode(found, dtype), decode(expected, dtype)
        with np.errstate(all="ignore"):
            bad = ~((a == b) | (np.abs(a - b) <= ulps * 2.0 ** (1 - bits) * np.abs(b)) | (np.isnan(a) & np.isnan(b)))
    else:
        a, b = decode(found, dtype), decode(expected, dtype)
        bad = (a != b) & ~(np.isnan(a) & np.isnan(b)) if a.dtype.kind in "fc" else a != b
    if not bad.any():
        return ""
    first = int(np.argmax(bad))
    return f"{int(bad.sum())} of {len(found)} elements differ; element {first} is {a[first]}, expected {b[first]}"
