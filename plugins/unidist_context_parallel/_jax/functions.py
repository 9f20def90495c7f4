"""JAX's functions of arrays for the ring of attention."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from unidist_context_parallel.attention.arrays import Array, ArrayFunctions


class JaxFunctions(ArrayFunctions):
    """See `ArrayFunctions`. In compiled programs, too."""

    @override
    def matmul(self, a: Array, b: Array) -> Array:
        return jnp.matmul(a, b)

    @override
    def transposed(self, x: Array) -> Array:
        return jnp.swapaxes(x, -1, -2)

    @override
    def exp(self, x: Array) -> Array:
        return jnp.exp(x)

    @override
    def log(self, x: Array) -> Array:
        return jnp.log(x)

    @override
    def maximum(self, a: Array, b: Array) -> Array:
        return jnp.maximum(a, b)

    @override
    def where(self, condition: Array, x: Array, other: float | Array) -> Array:
        return jnp.where(condition, x, other)

    @override
    def sum(self, x: Array, dim: int) -> Array:
        return jnp.sum(x, dim, keepdims=True)

    @override
    def max(self, x: Array, dim: int) -> Array:
        return jnp.max(x, dim, keepdims=True)

    @override
    def concatenate(self, arrays: Sequence[Array], dim: int) -> Array:
        return jnp.concatenate(arrays, dim)

    @override
    def take(self, x: Array, indices: npt.NDArray[np.int64], dim: int) -> Array:
        return jnp.take(x, indices, dim)

    @override
    def constant(self, x: npt.NDArray[np.int64]) -> Array:
        return jnp.asarray(x, jnp.int32)

    @override
    def zeros_like(self, x: Array) -> Array:
        return jnp.zeros_like(x)

    @override
    def cast(self, x: Array, like: Array) -> Array:
        return x.astype(like.dtype)

    @override
    def after(self, x: Array, *others: Array) -> Array:
        return jax.lax.optimization_barrier((x, *others))[0] if others else x
