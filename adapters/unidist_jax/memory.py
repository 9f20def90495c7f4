"""JAX's arrays as numpy arrays and buffers, and back, without copies where their memory is the host's.

JAX's arrays never change, and share memory with each other: what comes from `array_of` may only be read, and memory
that was given to `jax_array` must not be written to any more.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unidist.buffer import Buffer, DType
from unidist.errors import UsageError
from unidist_arrays.memory import NUMPY_DTYPES, Array, buffer_of_array

__all__ = ["array_of", "buffer_of", "dtype_of", "is_traced", "jax_array"]

_DTYPES = {numpy: ours for ours, numpy in NUMPY_DTYPES.items()}


def dtype_of(array: Any) -> DType:
    """Return the element type of an array, or raise UsageError for one without a counterpart (int4, float8, keys)."""
    try:
        return _DTYPES[np.dtype(array.dtype)]
    except (KeyError, TypeError):
        raise UsageError(f"arrays of {array.dtype} cannot be exchanged; choices: {', '.join(DType)}") from None


def is_traced(*values: Any) -> bool:
    """Return whether any of the values stands for one that a compiled program or a transformation computes later."""
    return any(isinstance(value, jax.core.Tracer) for value in values)


def as_jax(value: Any) -> Any:
    """Return a number, numpy array or JAX array as a JAX array or tracer.

    Raises:
        UsageError: 64-bit values that JAX would cut to 32 bits without a word, or values without a dtype of ours.
    """
    if not isinstance(value, jax.Array):
        if isinstance(value, np.ndarray | np.generic):
            check_width(value.dtype)
        try:
            value = jnp.asarray(value)
        except (OverflowError, TypeError, ValueError):
            raise UsageError(
                f"{value!r} of type {type(value).__name__} cannot be exchanged: give numbers and arrays, or trees of "
                "them"
            ) from None
    dtype_of(value)
    return value


def array_of(array: Any) -> Array:
    """Return the memory of an array as a C-contiguous numpy array, which must not be written to.

    Waits until the array was computed. Arrays on devices are copied to the host.

    Raises:
        UsageError: a tracer; an array that was donated; one that other processes hold parts of.
    """
    if isinstance(array, jax.core.Tracer):
        raise UsageError(
            f"{array} has no memory yet: it is traced by jit, grad or vmap. Use the operations of unidist.jax, which "
            "work on traced arrays, or call this outside of the traced function"
        )
    if isinstance(array, jax.Array):
        if array.is_deleted():
            raise UsageError(
                f"an array {array.dtype}{list(array.shape)} was donated to a compiled function and is gone; use what "
                "that function returned, or leave it out of donate_argnums"
            )
        if not array.is_fully_addressable:
            raise UsageError(
                f"an array {array.dtype}{list(array.shape)} is spread over several processes by jax.distributed; "
                "give this rank's own part: array.addressable_shards[i].data"
            )
    return np.ascontiguousarray(array).reshape(array.shape)


def jax_array(array: Array) -> jax.Array:
    """Return a JAX array over the memory, which must not be written to any more; a copy if it is not aligned.

    Raises:
        UsageError: 64-bit values that JAX would cut to 32 bits without a word.
    """
    check_width(array.dtype)
    return jax.device_put(array)


def check_width(dtype: np.dtype[Any]) -> None:
    """Raise UsageError if JAX would cut values of this type to 32 bits, as it does until it is told otherwise."""
    cut = jax.dtypes.canonicalize_dtype(dtype)
    if cut != dtype:
        raise UsageError(
            f"an array of {dtype}, while JAX computes in 32 bits: it would be cut to {cut}. Call "
            'jax.config.update("jax_enable_x64", True) first, or convert it yourself'
        )


def buffer_of(array: Any) -> Buffer:
    """Return the memory of an array as a buffer to read from; see `array_of`."""
    dtype_of(array)
    return buffer_of_array(array_of(array))
