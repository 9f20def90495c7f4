"""Leaves of trees as pieces of a checkpoint, and leaves that were read from one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unidist.checkpoint.format.interface import SavedSection
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, TensorInfo
from unidist.errors import CheckpointError, UsageError
from unidist_arrays.memory import NUMPY_DTYPES, Array, buffer_of_array, empty_array
from unidist_jax.memory import array_of, buffer_of, dtype_of, jax_array


def is_array(leaf: Any) -> bool:
    """Return whether a leaf has elements to save: an array of JAX or numpy, a random key, or what stands for one."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of random keys, of which the data are saved."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def info_of(name: str, leaf: Any) -> TensorInfo:
    """Return the name, shape and type of a leaf in a checkpoint."""
    if is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return TensorInfo(name, tuple(leaf.shape), dtype_of(leaf))


def data_shape(leaf: Any) -> tuple[int, ...]:
    """Return the shape of the elements of a leaf that are saved."""
    return info_of("", leaf).shape


def piece_of(info: TensorInfo, part: Part, leaf: Any) -> Piece:
    """Return a leaf as a piece, without a copy where its memory is the host's."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise UsageError(f"{info.name!r} is a jax.ShapeDtypeStruct, which has no elements; save arrays")
    return Piece(info, part, buffer_of(jax.random.key_data(leaf) if is_key(leaf) else leaf))


def read_leaf(
    section: SavedSection, name: str, part: Part, shape: Sequence[int], like: Any, *, factor: float = 1.0
) -> jax.Array:
    """Return part of a saved tensor, times a factor, as an array of JAX of the type of another leaf."""
    key = is_key(like)
    array = empty_array(tuple(shape), np.dtype(np.uint32) if key else NUMPY_DTYPES[dtype_of(like)])
    section.read(name, part, buffer_of_array(array))
    if factor != 1.0:
        array *= array.dtype.type(factor)
    return _wrapped(jax_array(array), like) if key else jax_array(array)


def plain_of(leaf: Any) -> Any:
    """Return a number, or a small array as nested lists of numbers, for the plain values of a checkpoint."""
    array = array_of(jax.random.key_data(leaf) if is_array(leaf) and is_key(leaf) else leaf)
    if jnp.issubdtype(array.dtype, jnp.floating):
        array = array.astype(np.float64)  # of which JSON keeps every bit
    return array.tolist()


def leaf_of(value: Any, like: Any, name: str) -> Any:
    """Return what `plain_of` was given, of the type of another leaf.

    Raises:
        CheckpointError: it has another shape.
    """
    if not is_array(like):
        return type(like)(value)
    key = is_key(like)
    info = info_of(name, like)
    array: Array = np.array(value, NUMPY_DTYPES[info.dtype])
    if array.shape != info.shape:
        raise CheckpointError(f"{name!r} of the optimizer state was saved with the shape {list(array.shape)}: {info}")
    return _wrapped(jnp.array(array), like) if key else jnp.array(array)


def _wrapped(data: jax.Array, like: Any) -> jax.Array:
    return jax.random.wrap_key_data(data, impl=str(jax.random.key_impl(like)))
