"""Element-wise reduction of two buffers in host memory; the only arithmetic of the algorithms.

float16 and bfloat16 are computed in float32 and rounded to nearest even. numpy is imported when first
used: the launcher reads the names of the algorithms on machines that have none.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import ReduceOp
from unidist.errors import ConfigurationError, UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_CHUNK = 1 << 15
"""Elements converted at a time where a wider type is needed: the temporaries stay in the processor's cache."""


def check_reduction(buffer: Buffer, op: ReduceOp) -> None:
    """Raise UsageError where `op` has no meaning for the dtype, or the memory is not the host's."""
    if buffer.dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise UsageError(f"{op} of {buffer.dtype}: complex numbers have no order. Use sum or product.")
    if buffer.memory != HOST:
        raise UsageError(
            f"an all-reduce algorithm over send and recv adds up in host memory, but the buffer is in {buffer.memory!r}. "
            "Leave out --allreduce-algorithm to use the engine's own, or copy the data to the host."
        )


def reduce_into(target: Buffer, source: Buffer, op: ReduceOp, scale: float = 1.0) -> None:
    """Set each element of `target` to `scale * (target op source)`; equal counts and dtypes, no partial overlap.

    On bool and integers the product with `scale` is computed in float64 and truncated toward zero.
    """
    _apply(target, source, op, scale)


def scale_in_place(target: Buffer, scale: float) -> None:
    """Multiply each element of `target` by `scale`, with the rounding of `reduce_into`."""
    if scale != 1.0:
        _apply(target, None, ReduceOp.SUM, scale)


def _apply(target: Buffer, source: Buffer | None, op: ReduceOp, scale: float) -> None:
    if not target.count:
        return
    np = _numpy()
    into = _array(target)
    operand = None if source is None else _array(source)
    # An overflow to infinity is the right result of a sum, as it is in every engine; numpy would warn of it.
    with np.errstate(all="ignore"):
        if target.dtype in (DType.FLOAT16, DType.BFLOAT16):
            for start in range(0, target.count, _CHUNK):
                piece = slice(start, start + _CHUNK)
                wide = _widen(into[piece], target.dtype)
                if operand is not None:
                    wide = _operation(op, target.dtype)(wide, _widen(operand[piece], target.dtype), out=wide)
                into[piece] = _narrow(wide * np.float32(scale) if scale != 1.0 else wide, target.dtype)
            return
        if operand is not None:
            _operation(op, target.dtype)(into, operand, out=into)
        if scale == 1.0:
            return
        if target.dtype.is_floating or target.dtype.is_complex:
            into *= scale
        else:
            into[...] = np.trunc(into.astype(np.float64) * scale).astype(into.dtype)


def _widen(values: npt.NDArray[Any], dtype: DType) -> npt.NDArray[np.float32]:
    np = _numpy()
    if dtype is DType.BFLOAT16:  # the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _narrow(values: npt.NDArray[np.float32], dtype: DType) -> npt.NDArray[Any]:
    np = _numpy()
    if dtype is DType.FLOAT16:
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    # Add just under half of the last kept bit, and one more when that bit is odd: round to nearest, ties to even.
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    # A NaN whose payload is in the lower half would round to infinity: keep the upper half, made quiet.
    return np.where(np.isnan(values), (bits >> 16) | np.uint32(0x40), rounded).astype(np.uint16)


def _operation(op: ReduceOp, dtype: DType) -> np.ufunc:
    np = _numpy()
    if dtype is DType.BOOL:
        return np.logical_or if op in (ReduceOp.SUM, ReduceOp.MAX) else np.logical_and
    operations: dict[ReduceOp, np.ufunc] = {
        ReduceOp.SUM: np.add,
        ReduceOp.PRODUCT: np.multiply,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
    }
    return operations[op]


def _array(buffer: Buffer) -> npt.NDArray[Any]:
    return _numpy().frombuffer(buffer.bytes(), dtype="uint16" if buffer.dtype is DType.BFLOAT16 else buffer.dtype.value)


@functools.cache
def _numpy() -> Any:
    try:
        import numpy as np
    except ImportError as exc:
        raise ConfigurationError(
            "the all-reduce algorithms over send and recv need numpy to add up, and it is not installed. "
            "Run `pip install numpy`, or leave out --allreduce-algorithm."
        ) from exc
    return np
