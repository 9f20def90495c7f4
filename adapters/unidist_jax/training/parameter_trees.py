"""Trees of parameters that have other leaves, too, as modules of equinox do: functions, texts, settings."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from unidist.errors import UsageError
from unidist_jax.memory import as_jax


def split(tree: Any) -> tuple[Any, Any]:
    """Return a tree with the arrays of a tree, and one with its other leaves; None where the other has the leaf.

    Raises:
        UsageError: a leaf is a Python number of floating point, which may be meant as a parameter or as a setting.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, float | complex) and not isinstance(leaf, np.generic):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise UsageError(
                f"{name!r} is the Python number {leaf!r}: give jnp.asarray({leaf!r}) to train it. If it is a setting "
                "of a module, give the arrays alone: params, static = eqx.partition(model, eqx.is_inexact_array), and "
                "eqx.combine(params, static) in loss_fn"
            )
    arrays = jax.tree.map(lambda leaf: _as_array(leaf) if _is_array(leaf) else None, tree)
    return arrays, jax.tree.map(lambda leaf: None if _is_array(leaf) else leaf, tree)


def merged(arrays: Any, others: Any) -> Any:
    """Return the tree that `split` has taken apart."""
    if not jax.tree.leaves(others):
        return arrays
    return jax.tree.map(
        lambda array, other: other if array is None else array, arrays, others, is_leaf=lambda leaf: leaf is None
    )


def _as_array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array) else as_jax(leaf)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)
