"""Element types and reductions that Horovod lacks, expressed by those that it has.

Ranks that use different types must be told apart although both may travel as one. Horovod compares shapes, so each
type that needs a carrier is given trailing dims of size 1, a different number for each type.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp
from unidist.errors import UsageError
from unidist_horovod.bindings.interface import MOVED_DTYPES, REDUCED_DTYPES

Array = npt.NDArray[Any]

_BY_WIDTH = {1: DType.UINT8, 2: DType.INT16, 4: DType.INT32, 8: DType.INT64}
_NUM_MARKS = {dtype: number for number, dtype in enumerate(DType)}

# Wider integers wrap around in the same way, and hold every value of the narrow ones.
_WIDER = {
    DType.BOOL: DType.INT32,
    DType.UINT8: DType.INT32,
    DType.INT8: DType.INT32,
    DType.INT16: DType.INT32,
    DType.UINT16: DType.INT32,
    DType.UINT32: DType.INT64,
    DType.UINT64: DType.INT64,
    DType.BFLOAT16: DType.FLOAT32,
}
_TOP_BIT = np.uint64(1 << 63)


def moved(buffer: Buffer) -> Buffer:
    """Return the same memory as elements that Horovod moves."""
    if buffer.dtype in MOVED_DTYPES:
        return buffer
    return buffer.cast(_BY_WIDTH[min(buffer.dtype.itemsize, 8)])


def num_moved(dtype: DType) -> int:
    """Return how many of the elements of `moved` make one of `dtype`."""
    return 2 if dtype is DType.COMPLEX128 else 1


def marks(dtype: DType, native: frozenset[DType]) -> tuple[int, ...]:
    """Return the trailing dims that tell `dtype` from the types of its carrier; `native` need none."""
    return () if dtype in native else (1,) * (1 + _NUM_MARKS[dtype])


class HorovodReduction:
    """One reduction: have Horovod reduce `given` into `result` with `op` and `scale`, then call `finish`.

    Args:
        source: this rank's values; not changed.
        target: for the outcome, of the same dtype; may be the same memory.
        op: the reduction wanted.
        scale: factor for the outcome.

    Raises:
        UsageError: Horovod cannot do this reduction of complex numbers.
    """

    def __init__(self, source: Buffer, target: Buffer, op: ReduceOp, scale: float) -> None:
        dtype = source.dtype
        self.given, self.result, self.op = source, target, op
        self.scale = scale if dtype.is_floating or dtype.is_complex else 1.0
        self.marks = marks(dtype, REDUCED_DTYPES)
        self._target = target
        self._factor = 1.0 if dtype.is_floating or dtype.is_complex or dtype is DType.BOOL else scale
        self._flips = dtype is DType.UINT64 and op in (ReduceOp.MIN, ReduceOp.MAX)
        if dtype.is_complex:
            if op is not ReduceOp.SUM:
                raise UsageError(f"{op} of {dtype} is not among Horovod's reductions; use sum, or engine shm")
            real = DType.FLOAT32 if dtype is DType.COMPLEX64 else DType.FLOAT64
            self.given, self.result = source.cast(real), target.cast(real)
        elif dtype not in REDUCED_DTYPES:
            if dtype is DType.BOOL:  # "or" is the largest number, "and" the smallest
                self.op = ReduceOp.MAX if op in (ReduceOp.SUM, ReduceOp.MAX) else ReduceOp.MIN
            self.given = self.result = _widened(source, flips=self._flips)

    def finish(self) -> None:
        """Bring the outcome from the carrier to the target, scaled."""
        if self._target.dtype in _WIDER:
            _narrow(self.result, self._target, flips=self._flips)
        if self._factor != 1.0:
            values = array_of(self._target)
            values[:] = scaled_integers(values, self._factor)


def scaled_integers(values: Array, scale: float) -> Array:
    """Return integers times `scale`, computed in float64 and truncated toward zero; 1/n divides exactly."""
    divisor = round(1.0 / scale) if scale else 0
    wide = values.astype(np.float64)
    return np.trunc(wide / divisor if divisor and 1.0 / divisor == scale else wide * scale)


def to_wide(buffer: Buffer) -> Array:
    """Return a copy of floating-point numbers as float64."""
    values = array_of(_widened(buffer, flips=False) if buffer.dtype is DType.BFLOAT16 else buffer)
    return values.astype(np.float64)


def write_wide(values: Array, target: Buffer) -> None:
    """Write float64 numbers into a buffer of a floating-point type, rounded."""
    if target.dtype is DType.BFLOAT16:
        _narrow(Buffer.of(values.astype(np.float32)), target, flips=False)
    else:
        array_of(target)[:] = values


def array_of(buffer: Buffer) -> Array:
    """Return an array over host memory without a copy; bfloat16 as its bits, in uint16."""
    dtype = np.dtype("uint16" if buffer.dtype is DType.BFLOAT16 else buffer.dtype.value)
    if not buffer.count:
        return np.empty(0, dtype)
    memory = (ctypes.c_char * buffer.nbytes).from_address(buffer.address)
    memory.unidist_owner = buffer.owner  # type: ignore[attr-defined]  # the array keeps `memory`, `memory` the owner
    array: Array = np.frombuffer(memory, dtype)  # type: ignore[call-overload]  # it takes any buffer
    return array


def _widened(source: Buffer, *, flips: bool) -> Buffer:
    values = array_of(source)
    if source.dtype is DType.BFLOAT16:
        wide: Array = (values.astype(np.uint32) << 16).view(np.float32)
    elif source.dtype is DType.UINT64:
        # The order of unsigned numbers is that of signed ones with the top bit flipped.
        wide = (values ^ _TOP_BIT if flips else values.copy()).view(np.int64)
    else:
        wide = values.astype(_WIDER[source.dtype].value)
    return Buffer.of(wide)


def _narrow(carrier: Buffer, target: Buffer, *, flips: bool) -> None:
    wide, values = array_of(carrier), array_of(target)
    if target.dtype is DType.BFLOAT16:
        bits = wide.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
        values[:] = np.where(np.isnan(wide), (bits >> 16) | 0x40, rounded)
    elif target.dtype is DType.UINT64:
        unsigned = wide.view(np.uint64)
        values[:] = unsigned ^ _TOP_BIT if flips else unsigned
    else:
        values[:] = wide
