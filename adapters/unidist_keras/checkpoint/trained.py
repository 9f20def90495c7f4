"""What ranks hold of a model's trainable variables, to be compared."""

from __future__ import annotations

from typing import Any

from unidist.checkpoint.format.interface import kept_state, placements_of
from unidist.checkpoint.format.pieces import Piece
from unidist_keras.checkpoint.names import stable_paths
from unidist_keras.checkpoint.states import ModelState
from unidist_keras.checkpoint.tensors import dtype_of


def trained_pieces(model: Any) -> list[Piece]:
    """Return the pieces of the trainable variables that this rank holds."""
    if not getattr(model, "built", True):
        return []
    places = placements_of(model)
    trained = {id(variable) for variable in model.trainable_variables}
    names = {
        places.placement(path, tuple(variable.shape), dtype_of(variable)).name
        for path, variable in stable_paths(model.weights).items()
        if id(variable) in trained
    }
    state = kept_state(model) or ModelState(model)
    return [piece for piece in state.pieces() if piece.tensor.name in names]
