"""The types in which `TrainStep` computes a loss, where the strategy `precision` chooses them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from unidist.gradients.precision import Precision, is_narrow
from unidist_arrays.memory import NUMPY_DTYPES


class ComputeTypes:
    """Casts what is float32 to the type of the computation, and the loss back.

    Args:
        precision: of the run; None, or one that computes in 32 bits: nothing is cast.
    """

    def __init__(self, precision: Precision | None) -> None:
        self._narrow = None
        if precision is not None and is_narrow(precision.compute):
            self._narrow = NUMPY_DTYPES[precision.compute]

    def narrowed(self, tree: Any) -> Any:
        """Return a tree with its arrays of float32 in the type of the computation; others stay as they are."""
        if self._narrow is None:
            return tree

        def cast(leaf: Any) -> Any:
            return leaf.astype(self._narrow) if getattr(leaf, "dtype", None) == jnp.float32 else leaf

        return jax.tree.map(cast, tree)

    def widened(self, loss: Any) -> Any:
        """Return a loss in at least 32 bits, if the computation is in 16."""
        return loss if self._narrow is None else loss.astype(jnp.promote_types(loss.dtype, jnp.float32))
