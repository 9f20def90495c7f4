"""Which part of which tensor of a checkpoint a leaf of this rank's trees is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unidist.buffer import DType
from unidist.checkpoint.format.interface import PlacesParameters, WholeParameters
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Placement, TensorInfo, slot_name
from unidist.errors import UsageError
from unidist_jax.checkpoint.tensors import info_of, is_array
from unidist_jax.framework import by_path
from unidist_jax.optimizer import LeafPiece


@dataclass(frozen=True)
class ParameterPlace:
    """The place of one parameter.

    Args:
        placement: where what this rank computes with belongs in the whole model.
        piece: the elements of that for which this rank keeps state; None: all.
    """

    placement: Placement
    piece: LeafPiece | None = None

    @property
    def name(self) -> str:
        """The path of the parameter in the whole model."""
        return self.placement.name

    def of(self, shape: tuple[int, ...], dtype: DType, slot: str | None = None) -> tuple[TensorInfo, Part] | None:
        """Return which part of which tensor an array is; None if it stands for nothing.

        Args:
            shape: of the array.
            dtype: of the array.
            slot: name of the slot that it is of the parameter; None: it is the parameter.

        Raises:
            UsageError: it is not of the parameter's shape, and the parameter is spread over ranks.
        """
        placement, piece = self.placement, self.piece
        if piece is not None and not piece.is_whole:
            if not piece.count:
                return None
            if shape == piece.own_shape:
                return placement.tensor(dtype, slot), placement.part(piece.start, piece.start + piece.count)
        elif shape == placement.local_shape:
            return placement.tensor(dtype, slot), placement.part()
        elif placement == Placement.whole(placement.name, placement.shape):
            name = placement.name if slot is None else slot_name(placement.name, slot)
            return TensorInfo(name, shape, dtype), Part.whole(shape)
        raise UsageError(
            f"{slot or 'the array'!r} of {placement.name!r} has the shape {list(shape)}, and the parameter is spread "
            "over ranks: what it is of the whole is not known. With zero, use zero:whole=true"
        )


def places_of(
    tree: Any, places: PlacesParameters | None = None, pieces: Sequence[LeafPiece] | None = None
) -> list[ParameterPlace]:
    """Return the places of the arrays of a tree, in their order.

    Args:
        tree: of parameters, or of this rank's pieces of them.
        places: where parameters belong; None: each is whole.
        pieces: of each array; None: all of it.

    Raises:
        UsageError: the pieces are those of another tree.
    """
    places = places or WholeParameters()
    leaves = {path: leaf for path, leaf in by_path(tree).items() if is_array(leaf)}
    if pieces is not None and len(pieces) != len(leaves):
        raise UsageError(f"the optimizer was distributed for {len(pieces)} arrays, and {len(leaves)} parameters given")
    found = []
    of_each: Sequence[LeafPiece | None] = [None] * len(leaves) if pieces is None else pieces
    for (path, leaf), piece in zip(leaves.items(), of_each, strict=True):
        info = info_of(path, leaf)
        placement = places.placement(path, info.shape if piece is None else piece.shape, info.dtype)
        found.append(ParameterPlace(placement, piece))
    return found
