"""Rebuilds a Keras optimizer that was built already for other variables: for shards, or for other shards.

It can keep its shard of the state that it had for whole variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from unidist_keras.slots import slot_lists
from unidist_tensorflow.memory import Array
from unidist_zero._keras.shards import VariableShard

_OF_NO_BUILD = ("_iterations", "_learning_rate")
"""Variables that an optimizer has before it is built."""


@dataclass(frozen=True)
class SavedState:
    """The state of an optimizer.

    Args:
        scalars: values of variables that it has one of, by attribute.
        slots: values of its variables for each of the model's, by attribute; first the sharded ones by place, then the
            local ones. None where it has none.
    """

    scalars: dict[str, Array]
    slots: dict[str, list[Array | None]]


def save_state(optimizer: Any, variables: Sequence[Any], local: Sequence[Any]) -> SavedState:
    """Take the state out of a built optimizer, so that it can be built again.

    Args:
        optimizer: of Keras 3, built for `variables` and `local`, or a LossScaleOptimizer with neither.
        variables: of the model, by place.
        local: those that are not sharded.
    """
    order = [optimizer._get_variable_index(variable) for variable in (*variables, *local)]
    slots: dict[str, list[Array | None]] = {}
    for name, kept in slot_lists(optimizer).items():
        slots[name] = [None if kept[index] is None else np.array(kept[index].numpy()) for index in order]
    return SavedState({name: np.array(value.numpy()) for name, value in unbuild(optimizer).items()}, slots)


def unbuild(optimizer: Any) -> dict[str, Any]:
    """Undo an optimizer's `build`, so that it can be built again.

    Returns:
        The variables that it had one of, by attribute.
    """
    singles = {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, keras.Variable) and name not in _OF_NO_BUILD
    }
    lists = slot_lists(optimizer)
    _untrack(optimizer, [*(each for kept in lists.values() for each in kept if each is not None), *singles.values()])
    for name in lists:
        optimizer.__dict__[name] = []  # whose memory is free before that of others is taken
    optimizer._trainable_variables = []
    optimizer._trainable_variables_indices = {}
    optimizer.built = False
    return singles


def restore_variables(optimizer: Any, singles: Mapping[str, Any]) -> None:
    """Give a rebuilt optimizer its old variables back, of those that it has one of: traced graphs use them.

    Args:
        optimizer: built.
        singles: as `unbuild` returned them.
    """
    for name, variable in singles.items():
        made = getattr(optimizer, name)
        was_tracked = _untrack(optimizer, [made])
        optimizer.__dict__[name] = variable
        if was_tracked:
            optimizer._track_variable(variable)


def single_variables(optimizer: Any) -> list[Any]:
    """Return variables that a built optimizer has one of, for any model: counts, learning rate, scales."""
    owners = [optimizer, *filter(None, [getattr(optimizer, "inner_optimizer", None)])]
    found = [value for owner in owners for value in vars(owner).values() if isinstance(value, keras.Variable)]
    return list({id(each): each for each in found}.values())


def _untrack(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Make an optimizer stop tracking variables; returns whether it tracked any."""
    own = {id(each) for each in optimizer._variables}
    known = [each for each in variables if id(each) in own]
    for each in known:  # what is made within a LossScaleOptimizer's `build` is not tracked
        optimizer._untrack_variable(each)
    return bool(known)


def restore_state(optimizer: Any, kept: SavedState, shards: Sequence[VariableShard], num_local: int) -> None:
    """Give a rebuilt optimizer this rank's shard of its old state.

    Args:
        optimizer: built for the variables of `shards`, then for local ones.
        kept: its old state.
        shards: of this rank.
        num_local: number of local variables.
    """
    for name, value in kept.scalars.items():
        getattr(optimizer, name).assign(value)
    for name, values in kept.slots.items():
        slots = getattr(optimizer, name)
        for shard, slot in zip(shards, slots, strict=False):
            if slot is not None:
                slot.assign(shard_of(shard, values, tuple(slot.shape)))
        first = len(values) - num_local
        for i, local in enumerate(values[first:] if num_local else ()):
            if local is not None:
                slots[len(shards) + i].assign(local)


def shard_of(shard: VariableShard, values: Sequence[Array | None], shape: tuple[int, ...]) -> Array:
    """Return the values of a slot of a shard.

    Args:
        shard: the shard.
        values: of the slot, for each place.
        shape: of the shard's slot; if it differs from the shard's, the slot belongs to a whole variable.
    """
    if shape != tuple(shard.variable.shape):
        value = values[shard.places[0]]
        assert value is not None
        return value
    flat = np.zeros(shard.segment.count, np.dtype(shard.variable.dtype))
    for piece in shard.segment.pieces:
        value = values[piece.parameter]
        start = piece.offset - shard.segment.offset
        if value is not None:
            flat[start : start + piece.count] = value.reshape(-1)[piece.start : piece.start + piece.count]
    return flat.reshape(shape)
