"""The reduction in numpy, for machines on which the C kernels were not built."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp

_CHUNK = 1 << 15
"""Elements converted at a time where a wider type is needed: the temporaries stay in the processor's cache."""

_OPERATIONS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}
_TRUTH_OPERATIONS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.logical_or,
    ReduceOp.PRODUCT: np.logical_and,
    ReduceOp.MIN: np.logical_and,
    ReduceOp.MAX: np.logical_or,
}


def reduce(target: Buffer, source: Buffer | None, op: ReduceOp, scale: float) -> None:
    """Reduce with numpy, as a `unidist.algorithms._reduce.Kernel` does."""
    into = _array(target)
    operand = None if source is None else _array(source)
    # An overflow to infinity is the right result of a sum, as it is in every engine; numpy would warn of it.
    with np.errstate(all="ignore"):
        if target.dtype in (DType.FLOAT16, DType.BFLOAT16):
            _reduce_narrow(into, operand, target.dtype, _OPERATIONS[op], scale)
            return
        if operand is not None:
            operations = _TRUTH_OPERATIONS if target.dtype is DType.BOOL else _OPERATIONS
            operations[op](into, operand, out=into)
        if scale != 1.0:
            _scale(into, target.dtype, scale)


def _reduce_narrow(
    into: npt.NDArray[Any], operand: npt.NDArray[Any] | None, dtype: DType, operation: np.ufunc, scale: float
) -> None:
    for start in range(0, len(into), _CHUNK):
        piece = slice(start, start + _CHUNK)
        wide = _widen(into[piece], dtype)
        if operand is not None:
            operation(wide, _widen(operand[piece], dtype), out=wide)
        if scale != 1.0:
            wide *= np.float32(scale)
        into[piece] = _narrow(wide, dtype)


def _scale(values: npt.NDArray[Any], dtype: DType, scale: float) -> None:
    if dtype.is_floating or dtype.is_complex:
        values *= scale
    elif dtype is DType.BOOL:
        values &= bool(scale)
    else:
        # A mean must not lose a whole unit to rounding: 49 * (1.0 / 49) is below 1. Scales 1/n divide by n.
        divisor = np.rint(1.0 / scale) if scale else np.inf
        exact = 1.0 / divisor == scale if np.isfinite(divisor) and divisor else False
        wide = values.astype(np.float64)
        values[...] = np.trunc(wide / divisor if exact else wide * scale).astype(values.dtype)


def _widen(values: npt.NDArray[Any], dtype: DType) -> npt.NDArray[np.float32]:
    if dtype is DType.BFLOAT16:  # the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _narrow(values: npt.NDArray[np.float32], dtype: DType) -> npt.NDArray[Any]:
    if dtype is DType.FLOAT16:
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    # Add just under half of the last kept bit, and one more when that bit is odd: round to nearest, ties to even.
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    # A NaN whose payload is in the lower half would round to infinity: keep the upper half, made quiet.
    return np.where(np.isnan(values), (bits >> 16) | np.uint32(0x40), rounded).astype(np.uint16)


def to_wide(buffer: Buffer) -> npt.NDArray[Any]:
    """Return the values of a floating-point buffer, 16-bit ones as float32, others as a view of its memory."""
    narrow = buffer.dtype in (DType.FLOAT16, DType.BFLOAT16)
    return _widen(_array(buffer), buffer.dtype) if narrow else _array(buffer)


def from_wide(values: npt.NDArray[Any], buffer: Buffer) -> None:
    """Write values of any floating-point type to a buffer of another, rounded once."""
    with np.errstate(all="ignore"):
        if buffer.dtype in (DType.FLOAT16, DType.BFLOAT16):
            _array(buffer)[:] = _narrow(values.astype(np.float32), buffer.dtype)
        else:
            _array(buffer)[:] = values


def _array(buffer: Buffer) -> npt.NDArray[Any]:
    return np.frombuffer(buffer.bytes(), dtype="uint16" if buffer.dtype is DType.BFLOAT16 else buffer.dtype.value)
