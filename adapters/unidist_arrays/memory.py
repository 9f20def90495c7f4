"""Arrays as buffers, and buffers as arrays, without copies.

Results are written into memory at the alignment at which frameworks take it over as it is.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from unidist.buffer import HOST, Buffer, DType
from unidist.errors import UsageError

__all__ = [
    "ALIGNMENT",
    "NUMPY_DTYPES",
    "Array",
    "address_of",
    "array_of_buffer",
    "buffer_of_array",
    "digest_of_array",
    "empty_array",
]

Array = np.ndarray[Any, Any]

NUMPY_DTYPES: dict[DType, np.dtype[Any]] = {
    dtype: np.dtype(ml_dtypes.bfloat16 if dtype is DType.BFLOAT16 else dtype.value) for dtype in DType
}
_DTYPES = {theirs: ours for ours, theirs in NUMPY_DTYPES.items()}

ALIGNMENT = 64
"""Of tensors in bytes: TensorFlow and JAX take memory over as it is only where it is aligned so, else they copy it."""


def empty_array(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return a new array that frameworks take over without a copy. Its content is undefined."""
    nbytes = prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -address_of(memory) % ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(tuple(shape))


def digest_of_array(array: Any) -> bytes:
    """Return a digest of the bits of the elements of what numpy can read."""
    return hashlib.blake2b(np.asarray(array).tobytes(), digest_size=16).digest()


def address_of(array: Array) -> int:
    """Return the address of an array's memory."""
    address: int = array.__array_interface__["data"][0]
    return address


def buffer_of_array(array: Array) -> Buffer:
    """Return a C-contiguous array's memory as a buffer, whether or not numpy allows writing to it.

    Raises:
        UsageError: arrays of its element type cannot be exchanged.
    """
    dtype = _DTYPES.get(array.dtype)
    if dtype is None:
        raise UsageError(f"arrays of {array.dtype!r} cannot be exchanged; choices: {', '.join(DType)}")
    return Buffer(address_of(array), array.size, dtype, array)


def array_of_buffer(buffer: Buffer, shape: Sequence[int] | None = None) -> Array:
    """Return a writable array over a buffer's memory; it keeps the buffer's owner alive. Flat without `shape`.

    Raises:
        UsageError: the memory is that of a device.
    """
    if buffer.memory != HOST:
        raise UsageError(f"memory of kind {buffer.memory!r} cannot be used as an array; choices: {HOST}")
    dtype = NUMPY_DTYPES[buffer.dtype]
    if not buffer.count:
        flat = np.empty(0, dtype)
    else:
        memory = (ctypes.c_char * buffer.nbytes).from_address(buffer.address)
        memory.unidist_owner = buffer  # type: ignore[attr-defined]  # the array keeps `memory`, `memory` the owner
        flat = np.frombuffer(memory, dtype)  # type: ignore[call-overload]  # takes any buffer
    return flat if shape is None else flat.reshape(tuple(shape))
