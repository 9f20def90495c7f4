"""A rank's elements of a leaf of the parameters, where each rank updates some of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class LeafPiece:
    """Consecutive elements of one leaf.

    Args:
        shape: of the leaf.
        start: of the first element, counted in memory order.
        count: number of elements; 0: this rank has none of them, unless the leaf is empty.
    """

    shape: tuple[int, ...]
    start: int
    count: int

    @property
    def is_whole(self) -> bool:
        """All elements of the leaf."""
        return self.count == prod(self.shape)

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the array: the leaf's, or `(count, 1, ...)` with as many dimensions.

        Where this rank has no elements it is one zero: optimizers divide by sizes.
        """
        if self.is_whole:
            return self.shape
        return (max(1, self.count), *(1,) * (len(self.shape) - 1)) if self.shape else ()

    def of(self, leaf: Any) -> Any:
        """Return the piece of an array or tracer of the leaf's shape, or of one of numpy."""
        if self.is_whole:
            return leaf
        if not self.count:
            return (np if isinstance(leaf, np.ndarray) else jnp).zeros(self.own_shape, leaf.dtype)
        return leaf.reshape(-1)[self.start : self.start + self.count].reshape(self.own_shape)
