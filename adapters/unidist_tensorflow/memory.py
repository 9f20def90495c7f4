"""Tensors as arrays and buffers, and back, without copies.

An eager tensor's memory is read through numpy. Results are written into memory that numpy allocated at TensorFlow's
alignment and are then handed over as they are: by DLPack in eager mode, by `tf.numpy_function` in graphs. Nothing
writes into the memory of a tensor that TensorFlow made: tensors are immutable, and share memory with each other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from unidist.buffer import Buffer, DType
from unidist.errors import UsageError
from unidist_arrays.memory import (
    ALIGNMENT,
    NUMPY_DTYPES,
    Array,
    address_of,
    array_of_buffer,
    buffer_of_array,
    empty_array,
)

__all__ = [
    "DTYPES", "NUMPY_DTYPES", "Array", "address_of", "array_of", "array_of_buffer", "buffer_of", "buffer_of_array",
    "dtype_of", "empty_array", "tensor_of_array",
]  # fmt: skip

DTYPES: dict[tf.DType, DType] = {
    tf.bool: DType.BOOL,
    tf.uint8: DType.UINT8,
    tf.int8: DType.INT8,
    tf.uint16: DType.UINT16,
    tf.int16: DType.INT16,
    tf.uint32: DType.UINT32,
    tf.int32: DType.INT32,
    tf.uint64: DType.UINT64,
    tf.int64: DType.INT64,
    tf.float16: DType.FLOAT16,
    tf.bfloat16: DType.BFLOAT16,
    tf.float32: DType.FLOAT32,
    tf.float64: DType.FLOAT64,
    tf.complex64: DType.COMPLEX64,
    tf.complex128: DType.COMPLEX128,
}

_BFLOAT16 = NUMPY_DTYPES[DType.BFLOAT16]


def dtype_of(tensor: Any) -> DType:
    """Return the element type of a tensor or variable, or raise UsageError for one without a counterpart (string)."""
    dtype = tf.as_dtype(tensor.dtype)
    try:
        return DTYPES[dtype]
    except KeyError:
        raise UsageError(f"tensors of {dtype.name} cannot be exchanged; choices: {', '.join(DType)}") from None


def array_of(tensor: Any) -> Array:
    """Return the memory of an eager tensor as a C-contiguous array, which must not be written to.

    Tensors on other devices are copied to the host.
    """
    if not tensor.shape.rank and tensor.dtype == tf.bfloat16:  # whose __array__ gives a scalar, which is no array
        return np.asarray(tf.reshape(tensor, [1])).reshape(())
    return np.ascontiguousarray(tensor).reshape(tensor.shape)


def tensor_of_array(array: Array) -> tf.Tensor:
    """Return an eager tensor over the array's memory, which must not be written to any more.

    There is no copy if the array is C-contiguous and aligned, as those of `empty_array` are.
    """
    if not array.size or address_of(array) % ALIGNMENT:
        return tf.constant(array)
    if array.dtype == _BFLOAT16:  # unknown to numpy's DLPack
        return tf.bitcast(tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__()), tf.bfloat16)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def buffer_of(tensor: Any) -> Buffer:
    """Return the memory of an eager tensor as a buffer to read from, without a copy.

    Raises:
        UsageError: a symbolic tensor, one that is not in host memory, or of a dtype without a DType.
    """
    dtype_of(tensor)
    if not tf.is_tensor(tensor) or not hasattr(tensor, "numpy"):
        raise UsageError(f"{tensor!r} has no memory: only eager tensors have; use operations on tensors in graphs")
    if "CPU" not in tensor.device.upper():
        raise UsageError(f"a tensor on {tensor.device} has no host memory; copy it with tf.identity under tf.device")
    return buffer_of_array(array_of(tensor))
