"""Sharded Keras optimizers and fragmented models in checkpoints: each rank has parts of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import override

from unidist.buffer import Buffer
from unidist.checkpoint.format.interface import KeepsState, Plain, SavedSection
from unidist.checkpoint.format.optimizer_record import OptimizerRecord
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, Placement, TensorInfo, slot_name
from unidist_keras.checkpoint import OptimizerState, piece_of, plain_class, read_into, slot_of, stable_paths
from unidist_keras.slots import slot_lists
from unidist_tensorflow.memory import NUMPY_DTYPES, Array, buffer_of_array, dtype_of, empty_array
from unidist_zero._keras.fragments.variables import Fragment
from unidist_zero._keras.shards import VariableShard

MASTER = "master"
"""The slot of what a variable of 16 bits is updated as."""


@dataclass(frozen=True)
class _Slot:
    """One of the optimizer's variables for a shard.

    Args:
        shard: the shard.
        name: neutral.
        value: the optimizer's variable.
        index: of the shard among the optimizer's variables.
    """

    shard: VariableShard
    name: str
    value: Any
    index: int

    @property
    def is_cut(self) -> bool:
        """True: it has an element for each of the shard's; False: it belongs to a whole variable."""
        return tuple(self.value.shape) == tuple(self.shard.variable.shape)


class ShardedOptimizerState(OptimizerState):
    """The state of an optimizer that was built for shards.

    Args:
        optimizer: the bound optimizer.
        models: whose variables it updates, by prefix of their paths.
        variables: of the models, by place.
        shards: of this rank.
    """

    def __init__(
        self, optimizer: Any, models: Mapping[str, Any], variables: Sequence[Any], shards: Sequence[VariableShard]
    ) -> None:
        super().__init__(optimizer, models)
        self._of_models = list(variables)
        self._shards = list(shards)

    @override
    def pieces(self) -> Sequence[Piece]:
        found = []
        for slot in self._shard_slots():
            for offset, count, info, part in self._parts(slot):
                found.append(Piece(info, part, partial(_copied, slot.value, offset, count)))
        return found

    @override
    def load(self, section: SavedSection, *, strict: bool) -> None:
        record = OptimizerRecord.of(section.values)
        fresh: dict[tuple[int, str], Array] | None = None
        for slot in self._shard_slots():
            if slot.name == MASTER and not any(info.name in section.tensors for *_, info, _ in self._parts(slot)):
                continue  # it follows the model's variable
            array = np.array(slot.value.numpy()).reshape(-1)
            for offset, count, info, part in self._parts(slot):
                target = empty_array((count,), array.dtype)
                path = info.name.rpartition(slot_name("", slot.name))[0]
                name = self._saved_name(record, path, slot.name)
                if name in section.tensors:
                    section.read(name, part, buffer_of_array(target))
                    factor = self._factor(slot.name, record, path)
                    if factor != 1.0:
                        target *= array.dtype.type(factor)
                else:
                    fresh = self._fresh_slots() if fresh is None else fresh
                    target[:] = fresh[slot.index, slot.name].reshape(-1)[offset : offset + count]
                array[offset : offset + count] = target
            slot.value.assign(array.reshape(tuple(slot.value.shape)))
        self._load_numbers(record)

    def _variables(self) -> list[Any]:
        return list(self._of_models)

    def _slots(self, optimizer: Any = None) -> Iterator[tuple[int, Placement, str, Any]]:
        """Yield nothing: no slot belongs to a whole variable of the model."""
        return iter(())

    def _native_slots(self, optimizer: Any) -> Iterator[tuple[Placement, dict[str, Any]]]:
        for shard, slots in self._shards_with_slots(optimizer):
            for place in shard.places:
                yield self._placement(self._of_models[place]), slots

    def _shards_with_slots(self, optimizer: Any) -> Iterator[tuple[VariableShard, dict[str, Any]]]:
        """Yield the shards of this rank, with what the optimizer keeps for each, by Keras' names."""
        lists = slot_lists(optimizer)
        for index, shard in enumerate(self._shards):
            kept = {attribute: values[index] for attribute, values in lists.items() if values[index] is not None}
            yield shard, {slot_of(value, shard.variable, name): value for name, value in kept.items()}

    def _shard_slots(self, optimizer: Any = None) -> list[_Slot]:
        optimizer = self._inner if optimizer is None else optimizer
        found = []
        for index, (shard, slots) in enumerate(self._shards_with_slots(optimizer)):
            naming = self._naming.of_parameter(slots)
            found += [_Slot(shard, naming.neutral(slot), value, index) for slot, value in slots.items()]
        if optimizer is self._inner:
            for index, shard in enumerate(self._shards):
                if dtype_of(shard.variable) != dtype_of(self._of_models[shard.places[0]]):
                    found.append(_Slot(shard, MASTER, shard.variable, index))
        return found

    def _parts(self, slot: _Slot) -> Iterator[tuple[int, int, TensorInfo, Part]]:
        """Yield for each variable of the model: offset and count in the slot, the tensor, and the part of it."""
        dtype = dtype_of(slot.value)
        for piece in slot.shard.segment.pieces:
            placement = self._placement(self._of_models[piece.parameter])
            if slot.is_cut:
                part = placement.part(piece.start, piece.start + piece.count)
                yield piece.offset - slot.shard.segment.offset, piece.count, placement.tensor(dtype, slot.name), part
            else:
                info = TensorInfo(slot_name(placement.name, slot.name), tuple(slot.value.shape), dtype)
                yield 0, info.count, info, Part.whole(info.shape)

    def _fresh_slots(self) -> dict[tuple[int, str], Array]:
        made = plain_class(self._inner).from_config(self._inner.get_config())
        made.build([shard.variable for shard in self._shards])
        return {(slot.index, slot.name): np.array(slot.value.numpy()) for slot in self._shard_slots(made)}


class FragmentedModelState(KeepsState):
    """The weights of a model of which this rank has fragments.

    Args:
        model: the model.
        fragments: by id of the variable; other weights are whole on every rank.
    """

    def __init__(self, model: Any, fragments: Mapping[int, Fragment]) -> None:
        self._weights = stable_paths(model.weights)
        self._fragments = fragments

    @override
    def pieces(self) -> Sequence[Piece]:
        found = []
        for path, variable in self._weights.items():
            info, fragment = self._info(path, variable), self._fragments.get(id(variable))
            if fragment is None:
                found.append(piece_of(info, Part.whole(info.shape), variable))
            elif fragment.piece is not None:
                piece = fragment.piece
                part = Part.flat(info.shape, piece.start, piece.start + piece.count)
                found.append(Piece(info, part, partial(_converted, fragment)))
        return found

    @override
    def values(self) -> dict[str, Plain]:
        return {}

    @override
    def names(self) -> list[str]:
        """See `KeepsState.names`: also those of which this rank has nothing."""
        return list(self._weights)

    @override
    def check(self, section: SavedSection, *, strict: bool) -> None:
        section.match([self._info(path, variable) for path, variable in self._weights.items()], strict=strict)

    @override
    def load(self, section: SavedSection, *, strict: bool) -> None:
        for path, variable in self._weights.items():
            info, fragment = self._info(path, variable), self._fragments.get(id(variable))
            if path not in section.tensors:
                continue
            if fragment is None:
                read_into(section, path, Part.whole(info.shape), variable)
            elif fragment.piece is not None:
                piece = fragment.piece
                part = Part.flat(info.shape, piece.start, piece.start + piece.count)
                read_into(section, path, part, fragment.storage)
                fragment.show()

    def _info(self, path: str, variable: Any) -> TensorInfo:
        return TensorInfo(path, tuple(variable.shape), dtype_of(variable))


def _copied(value: Any, offset: int, count: int) -> Buffer:
    return buffer_of_array(np.array(value.numpy()).reshape(-1)[offset : offset + count].copy())


def _converted(fragment: Fragment) -> Buffer:
    array = np.array(fragment.storage.numpy()).reshape(-1).astype(NUMPY_DTYPES[fragment.dtype])
    return buffer_of_array(array)
