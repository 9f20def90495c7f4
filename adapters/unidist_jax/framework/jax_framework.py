"""JAX behind the core's framework interface. A model is a tree with arrays in it: a dict of parameters, say."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from unidist.buffer import Buffer, DType
from unidist_arrays.host_framework import HostFramework


class JaxFramework(HostFramework):
    """JAX for the core. jax is imported when an array is first handled."""

    name = "jax"

    @override
    def is_tensor(self, value: object) -> bool:
        jax = sys.modules.get("jax")
        return jax is not None and hasattr(jax, "Array") and isinstance(value, jax.Array)

    @override
    def is_model(self, value: object) -> bool:
        """Return whether it is a tree with an array of JAX in it, and not an array itself."""
        jax = sys.modules.get("jax")
        if jax is None or not hasattr(jax, "tree") or self.is_tensor(value):
            return False
        return any(self.is_tensor(leaf) for leaf in jax.tree.leaves(value))

    @override
    def buffer(self, tensor: Any) -> Buffer:
        from unidist_jax.memory import buffer_of

        return buffer_of(tensor)

    @override
    def tensor(self, buffer: Buffer, shape: Sequence[int]) -> Any:
        """Return an array over the memory, or a copy if that is not at JAX's alignment of 64 bytes."""
        from unidist_arrays.memory import array_of_buffer
        from unidist_jax.memory import jax_array

        return jax_array(array_of_buffer(buffer, shape))

    @override
    def dtype(self, tensor: Any) -> DType:
        from unidist_jax.memory import dtype_of

        return dtype_of(tensor)

    @override
    def parameters(self, model: Any) -> Mapping[str, Any]:
        """Return the arrays of floating point, by their paths in the tree."""
        import jax.numpy as jnp

        return {path: leaf for path, leaf in self.model_state(model).items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}

    @override
    def model_state(self, model: Any) -> Mapping[str, Any]:
        """Return all arrays, by their paths in the tree; random keys are left out, since they have no elements."""
        import jax
        import jax.numpy as jnp

        return {
            path: leaf
            for path, leaf in by_path(model).items()
            if self.is_tensor(leaf) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        }


def by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path: keys, names and positions, with slashes between them."""
    import jax

    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
