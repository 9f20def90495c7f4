"""This rank's pieces of the leaves of a tree, as the arrays that an optimizer of optax is given.

They are in a tree of the same structure, so masks and labels by path keep working. A piece has as many dimensions as
its leaf, for masks that ask for them ("no weight decay for biases").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from unidist_jax.optimizer import LeafPiece
from unidist_zero.sharding.partition import Partition


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
