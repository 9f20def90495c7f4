"""This rank's pieces of the leaves of a tree, as the arrays that an optimizer of optax is given.

They are in a tree of the same structure, so masks and labels by path keep working. A piece has as many dimensions as
its leaf, for masks that ask for them ("no weight decay for biases").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unidist_zero.sharding.partition import Partition


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


def pieces_of_rank(partition: Partition, rank: int, shapes: Sequence[tuple[int, ...]]) -> list[LeafPiece]:
    """Return a rank's piece of each leaf.

    Args:
        partition: of the leaves, numbered by place. It has at most one piece of a leaf on each rank.
        rank: within the shard group.
        shapes: of the leaves.
    """
    owned = {piece.parameter: piece for piece in partition.pieces(rank)}
    found = []
    for place, shape in enumerate(shapes):
        piece = owned.get(place)
        found.append(LeafPiece(shape, 0, 0) if piece is None else LeafPiece(shape, piece.start, piece.count))
    return found


def cut(tree: Any, pieces: Sequence[LeafPiece]) -> Any:
    """Return a tree with the pieces of a tree's leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [piece.of(leaf) for piece, leaf in zip(pieces, leaves, strict=True)])
