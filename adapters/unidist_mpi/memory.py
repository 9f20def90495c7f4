"""Buffers and reductions in MPI's words."""

from __future__ import annotations

import functools
import threading
from typing import Any

from mpi4py import MPI

from unidist.algorithms import reduce_into
from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp

DATATYPES: dict[DType, MPI.Datatype] = {
    DType.BOOL: MPI.C_BOOL,
    DType.UINT8: MPI.UINT8_T,
    DType.INT8: MPI.INT8_T,
    DType.UINT16: MPI.UINT16_T,
    DType.INT16: MPI.INT16_T,
    DType.UINT32: MPI.UINT32_T,
    DType.INT32: MPI.INT32_T,
    DType.UINT64: MPI.UINT64_T,
    DType.INT64: MPI.INT64_T,
    DType.FLOAT32: MPI.FLOAT,
    DType.FLOAT64: MPI.DOUBLE,
    DType.COMPLEX64: MPI.C_FLOAT_COMPLEX,
    DType.COMPLEX128: MPI.C_DOUBLE_COMPLEX,
    # MPI 3 has no 16-bit floats. These stand for them in our own reductions, which know no 16-bit integers.
    DType.FLOAT16: MPI.UINT16_T,
    DType.BFLOAT16: MPI.INT16_T,
}
_NATIVE = {ReduceOp.SUM: MPI.SUM, ReduceOp.PRODUCT: MPI.PROD, ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX}
_TRUTH = {ReduceOp.SUM: MPI.LOR, ReduceOp.PRODUCT: MPI.LAND, ReduceOp.MIN: MPI.LAND, ReduceOp.MAX: MPI.LOR}
_OWN_DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)
_lock = threading.Lock()


def memory_of(buffer: Buffer) -> Any:
    """Return the memory of a buffer as mpi4py takes it, without a copy."""
    return MPI.buffer.fromaddress(buffer.address, buffer.nbytes)


def bytes_of(buffer: Buffer) -> tuple[Any, int, MPI.Datatype]:
    """Return a buffer as a message of bytes."""
    return memory_of(buffer), buffer.nbytes, MPI.BYTE


def elements_of(buffer: Buffer) -> tuple[Any, int, MPI.Datatype]:
    """Return a buffer as a message of elements that a reduction of `operation_for` understands."""
    return memory_of(buffer), buffer.count, DATATYPES[buffer.dtype]


def operation_for(dtype: DType, op: ReduceOp) -> MPI.Op:
    """Return MPI's reduction, or ours where MPI has none that carries a NaN on, or none at all."""
    if dtype is DType.BOOL:
        return _TRUTH[op]
    narrow = dtype in (DType.FLOAT16, DType.BFLOAT16)
    if narrow or (dtype.is_floating and op in (ReduceOp.MIN, ReduceOp.MAX)):
        with _lock:
            return _own_operation(op)
    return _NATIVE[op]


@functools.cache
def _own_operation(op: ReduceOp) -> MPI.Op:
    def reduce(source: Any, target: Any, datatype: MPI.Datatype) -> None:
        dtype = next(each for each in _OWN_DTYPES if DATATYPES[each] == datatype)
        count = source.nbytes // dtype.itemsize
        into = Buffer(target.address, count, dtype)
        reduce_into(into, Buffer(source.address, count, dtype), op)

    return MPI.Op.Create(reduce, commute=True)
