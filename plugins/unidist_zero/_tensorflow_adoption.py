"""An optimizer of Keras that is built, with whole state, is built anew for shards and keeps its share of that state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from unidist_tensorflow.inner_step import kept_lists
from unidist_tensorflow.memory import Array
from unidist_zero._tensorflow_shards import Shard


@dataclass(frozen=True)
class Kept:
    """What an optimizer had.

    Args:
        scalars: values of variables that it has one of, by attribute.
        slots: values of what it has for each of the model's variables, by attribute; first the shared ones by place,
            then the local ones. None where it has nothing.
    """

    scalars: dict[str, Array]
    slots: dict[str, list[Array | None]]


def keep(optimizer: Any, variables: Sequence[Any], local: Sequence[Any]) -> Kept:
    """Take everything out of an optimizer that its `build` has made, so that it can be built again.

    Args:
        optimizer: of Keras 3, built for `variables` and `local`, or a LossScaleOptimizer with neither.
        variables: of the model, by place.
        local: those that are not shared.
    """
    order = [optimizer._get_variable_index(variable) for variable in (*variables, *local)]
    slots, made = {}, []
    for name, kept in kept_lists(optimizer).items():
        slots[name] = [None if kept[index] is None else np.array(kept[index].numpy()) for index in order]
        made += [each for each in kept if each is not None]
    scalars = {}
    own = {id(each) for each in optimizer._variables}
    for name, value in vars(optimizer).items():
        if isinstance(value, keras.Variable) and name not in ("_iterations", "_learning_rate"):
            scalars[name] = np.array(value.numpy())
            made.append(value)
    for each in made:
        if id(each) in own:  # what is made within a LossScaleOptimizer's `build` is not tracked
            optimizer._untrack_variable(each)
    optimizer._trainable_variables_indices = {}
    optimizer.built = False
    return Kept(scalars, slots)


def restore(optimizer: Any, kept: Kept, shards: Sequence[Shard], num_local: int) -> None:
    """Give an optimizer that was built anew its share of what it had.

    Args:
        optimizer: built for the variables of `shards`, then for local ones.
        kept: what it had.
        shards: of this rank.
        num_local: how many local variables there are.
    """
    for name, value in kept.scalars.items():
        getattr(optimizer, name).assign(value)
    for name, values in kept.slots.items():
        slots = getattr(optimizer, name)
        for shard, slot in zip(shards, slots, strict=False):
            if slot is not None:
                slot.assign(share_of(shard, values, tuple(slot.shape)))
        first = len(values) - num_local
        for i, local in enumerate(values[first:] if num_local else ()):
            if local is not None:
                slots[len(shards) + i].assign(local)


def share_of(shard: Shard, values: Sequence[Array | None], shape: tuple[int, ...]) -> Array:
    """Return what belongs into a slot of a shard.

    Args:
        shard: the shard.
        values: of the slot, for each place.
        shape: of the shard's slot; another one than the shard's is the slot's own, of a whole variable.
    """
    if shape != tuple(shard.variable.shape):
        value = values[shard.places[0]]
        assert value is not None
        return value
    flat = np.zeros(shard.run.count, np.dtype(shard.variable.dtype))
    for piece in shard.run.pieces:
        value = values[piece.parameter]
        start = piece.offset - shard.run.offset
        if value is not None:
            flat[start : start + piece.count] = value.reshape(-1)[piece.start : piece.start + piece.count]
    return flat.reshape(shape)
