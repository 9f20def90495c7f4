"""The arrays of a tree as a section of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from typing_extensions import override

from unidist.checkpoint.format.interface import KeepsState, PlacesParameters, Plain, SavedSection
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, TensorInfo
from unidist.errors import CheckpointError, UsageError
from unidist_jax.checkpoint.places import places_of
from unidist_jax.checkpoint.tensors import data_shape, info_of, is_array, piece_of, read_leaf
from unidist_jax.framework import by_path
from unidist_jax.optimizer import LeafPiece


class ModelState(KeepsState):
    """The arrays of a tree, by path; other leaves stay as they are.

    Args:
        tree: what this rank holds. To load into, arrays may be `jax.ShapeDtypeStruct`s, or donated ones.
        put: called with the tree that was loaded.
        places: where arrays belong in the whole model; None: each is whole.
        pieces: the tree has these pieces of each array; None: all of it.

    Attributes:
        loaded: that tree.

    Raises:
        UsageError: the tree has no arrays, or two leaves have the same path.
    """

    def __init__(
        self,
        tree: Any,
        put: Callable[[Any], object] | None = None,
        *,
        places: PlacesParameters | None = None,
        pieces: Sequence[LeafPiece] | None = None,
    ) -> None:
        self._leaves, self._structure = jax.tree.flatten(tree)
        self._put = put
        self.loaded: Any = None
        paths = list(by_path(tree))
        if len(paths) != len(self._leaves):
            raise UsageError("two leaves of the tree have the same path: leave slashes out of the keys of dicts")
        self._numbers = [number for number, leaf in enumerate(self._leaves) if is_array(leaf)]
        if not self._numbers:
            raise UsageError(f"{type(tree).__name__} is no tree with arrays in it, of JAX or numpy")
        self._places = places_of(tree, places, pieces)

    @override
    def pieces(self) -> Sequence[Piece]:
        return [piece_of(info, part, leaf) for info, part, _, leaf in self._tensors()]

    @override
    def values(self) -> dict[str, Plain]:
        return {}

    @override
    def names(self) -> list[str]:
        return [place.name for place in self._places]

    @override
    def check(self, section: SavedSection, *, strict: bool) -> None:
        own = [info for info, _, _, _ in self._tensors()]
        known = {info.name for info in own}
        others = [info for name, info in section.tensors.items() if name not in known and name in self.names()]
        section.match([*own, *others], strict=strict)  # also those of which this rank has nothing

    @override
    def load(self, section: SavedSection, *, strict: bool) -> None:
        leaves = list(self._leaves)
        for place, number in zip(self._places, self._numbers, strict=True):
            if place.piece is not None and not place.piece.count:  # it stands for nothing
                leaves[number] = jnp.zeros(leaves[number].shape, leaves[number].dtype)
        for info, part, number, leaf in self._tensors():
            if info.name in section.tensors:
                leaves[number] = read_leaf(section, info.name, part, data_shape(leaf), leaf)
        self.loaded = tree_of(leaves, self._structure, "the parameters")
        if self._put is not None:
            self._put(self.loaded)

    def _tensors(self) -> Iterator[tuple[TensorInfo, Part, int, Any]]:
        """Yield tensor and part of each leaf of which this rank has some, its position, and the leaf."""
        for place, number in zip(self._places, self._numbers, strict=True):
            leaf = self._leaves[number]
            found = place.of(data_shape(leaf), info_of(place.name, leaf).dtype)
            if found is not None:
                yield *found, number, leaf


def tree_of(leaves: Sequence[Any], structure: Any, what: str) -> Any:
    """Return the tree of leaves that were loaded; CheckpointError if one of them has no elements."""
    tree = jax.tree.unflatten(structure, leaves)
    empty = [path for path, leaf in by_path(tree).items() if isinstance(leaf, jax.ShapeDtypeStruct)]
    if empty:
        raise CheckpointError(
            f"the checkpoint does not have {', '.join(empty[:8])} of {what}, and load() was given types in their place "
            "(jax.ShapeDtypeStruct): give it arrays, which then stay as they are"
        )
    return tree
