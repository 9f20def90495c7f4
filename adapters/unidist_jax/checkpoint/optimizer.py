"""The state of an optimizer of optax in a checkpoint: the slots of its parameters, counts, and what else it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from typing_extensions import override

from unidist.checkpoint.format.interface import KeepsState, PlacesParameters, Plain, SavedSection
from unidist.checkpoint.format.optimizer_record import STEP, OptimizerRecord
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, TensorInfo, slot_name, split_slot
from unidist.checkpoint.format.slots import OPTAX, OptimizerNaming
from unidist.errors import CheckpointError, UsageError
from unidist_jax.checkpoint.layout import SlotLeaf, layout_of
from unidist_jax.checkpoint.model import tree_of
from unidist_jax.checkpoint.places import places_of
from unidist_jax.checkpoint.tensors import info_of, is_array, leaf_of, piece_of, plain_of, read_leaf
from unidist_jax.optimizer import LeafPiece

_MASTER = "master"
"""The slot of what strategies of other frameworks keep of 16-bit parameters in a wider type."""

_MOST_LISTED = 8


class OptimizerState(KeepsState):
    """The state of an optimizer of optax, or of this rank's pieces of it.

    Args:
        params: the parameters; only the structure, shapes and types of the tree are used.
        state: the tree that the optimizer's `init` or `update` has returned; to load into, see `ModelState`.
        put: called with the tree that was loaded.
        places: where the parameters belong in the whole model; None: each is whole.
        pieces: this rank's piece of each parameter, if the state is sharded.

    Attributes:
        loaded: that tree.
    """

    def __init__(
        self,
        params: Any,
        state: Any,
        put: Callable[[Any], object] | None = None,
        *,
        places: PlacesParameters | None = None,
        pieces: Sequence[LeafPiece] | None = None,
    ) -> None:
        self._put = put
        self.loaded: Any = None
        self._parameters = places_of(params, places, pieces)
        self._is_sharded = pieces is not None
        self._leaves, self._structure = jax.tree.flatten(state)
        layout = layout_of(params, state)
        self._slots, self._naming, self._namings = layout.slots, layout.naming, layout.namings
        self._counts, self._rates = layout.counts, layout.rates
        self._others = {path: place for path, place in layout.others.items() if _is_plain(self._leaves[place])}

    @override
    def pieces(self) -> Sequence[Piece]:
        found = []
        for slot in self._slots:
            place = self._place(slot)
            if place is not None:
                found.append(piece_of(*place, self._leaves[slot.leaf]))
        return found

    @override
    def values(self) -> dict[str, Plain]:
        record = OptimizerRecord(self._naming)
        record.groups["0"] = {"others": {path: plain_of(self._leaves[place]) for path, place in self._others.items()}}
        for place in self._rates[:1]:
            record.groups["0"]["learning_rate"] = plain_of(self._leaves[place])
        record.group_of = {each.name: "0" for each in self._parameters}
        for each, naming in zip(self._parameters, self._namings, strict=True):
            if naming is not None:
                record.add_family(each.name, naming)
        steps = self._steps()
        record.scalars = {self._parameters[place].name: {STEP: count} for place, count in steps.items()}
        return record.values()

    def _steps(self) -> dict[int, float]:
        """Return the number of updates of each parameter; empty where nothing depends on it."""
        of_all = [float(self._leaves[place]) for place in self._counts]
        if not of_all and any(naming is not None and naming.counts_steps for naming in self._namings):
            of_all = [0.0]  # optax does not count them here; others do, and use it for nothing but their own options
        if not of_all:
            return {}
        own = {slot.parameter: float(self._leaves[slot.count]) for slot in self._slots if slot.count is not None}
        return {place: own.get(place, max(of_all)) for place in range(len(self._parameters))}

    @override
    def names(self) -> list[str]:
        return [each.name for each in self._parameters]

    @override
    def check(self, section: SavedSection, *, strict: bool) -> None:
        placements = {each.name: each.placement for each in self._parameters}
        namings = dict(zip(placements, self._namings, strict=True))
        record = OptimizerRecord.check(section, self._naming, placements, strict=strict, naming_of=namings.__getitem__)
        own = {self._saved_name(slot, record): slot for slot in self._slots}
        problems = []
        for name, info in section.tensors.items():
            path, kind = split_slot(name)
            if name in own:
                self._factor(own[name], record)
                place = self._place(own[name])
                if place is not None and place[0].shape != info.shape:
                    problems.append(f"{name} has the shape {list(info.shape)}, here {list(place[0].shape)}")
            elif strict and path in placements and kind != _MASTER:
                problems.append(f"{name} is not in this state")
        if strict and record.naming.dialect == OPTAX:
            problems += [f"{name} was not saved" for name in own if name not in section.tensors]
            differing = sorted(self._others.keys() ^ _others(record).keys())
            problems += [f"{path} is in only one of them" for path in differing]
        elif (
            strict
            and not any(STEP in each for each in record.scalars.values())
            and any(slot.count is not None and name in section.tensors for name, slot in own.items())
        ):
            problems.append("it does not say how many updates there were, which this optimizer counts")
        if problems:
            listed = "; ".join(problems[:_MOST_LISTED]) + ("; ..." if len(problems) > _MOST_LISTED else "")
            raise CheckpointError(
                f"the optimizer state that was saved does not fit this one: {listed}. Build the same optimizer, or "
                "load with strict=False what both have"
            )

    @override
    def load(self, section: SavedSection, *, strict: bool) -> None:
        record = OptimizerRecord.of(section.values)
        leaves = list(self._leaves)
        for slot in self._slots:
            place, name = self._place(slot), self._saved_name(slot, record)
            if place is not None and name in section.tensors:
                like = leaves[slot.leaf]
                factor = self._factor(slot, record)
                leaves[slot.leaf] = read_leaf(section, name, place[1], like.shape, like, factor=factor)
            elif place is None:  # it stands for nothing; what is there may be of a program that has failed
                leaves[slot.leaf] = jnp.zeros(leaves[slot.leaf].shape, leaves[slot.leaf].dtype)
        self._load_others(record, leaves)
        self.loaded = tree_of(leaves, self._structure, "the optimizer state")
        if self._put is not None:
            self._put(self.loaded)

    def _load_others(self, record: OptimizerRecord, leaves: list[Any]) -> None:
        """Set what belongs to no parameter; of another dialect's optimizer the count and the learning rate."""
        if record.naming.dialect == OPTAX:
            for path, value in _others(record).items():
                if path in self._others:
                    leaves[self._others[path]] = leaf_of(value, leaves[self._others[path]], path)
            return
        if any(STEP in scalars for scalars in record.scalars.values()):
            for place in self._counts:
                leaves[place] = leaf_of(record.steps, leaves[place], "count")
        rates = {record.learning_rate(each.name) for each in self._parameters} - {None}
        if len(rates) == 1:
            for place in self._rates:
                leaves[place] = leaf_of(rates.copy().pop(), leaves[place], "learning_rate")

    def _naming_of(self, slot: SlotLeaf) -> OptimizerNaming:
        return self._namings[slot.parameter] or self._naming

    def _neutral(self, slot: SlotLeaf) -> str:
        return self._naming_of(slot).neutral(slot.slot)

    def _saved_name(self, slot: SlotLeaf, record: OptimizerRecord) -> str:
        """Return the name under which a slot was saved."""
        path = self._parameters[slot.parameter].name
        return slot_name(path, record.slot_of(path, self._neutral(slot), self._naming_of(slot)))

    def _factor(self, slot: SlotLeaf, record: OptimizerRecord) -> float:
        path = self._parameters[slot.parameter].name
        saved, options = record.naming_of(path), record.options_of(path)
        return self._naming_of(slot).factor(self._neutral(slot), saved, options)

    def _place(self, slot: SlotLeaf) -> tuple[TensorInfo, Part] | None:
        """Return which part of which tensor a leaf is; None if it is none of this rank's.

        Raises:
            UsageError: the state is sharded, and nobody said how.
        """
        parameter, leaf = self._parameters[slot.parameter], self._leaves[slot.leaf]
        info = info_of("", leaf)
        if not self._is_sharded and _looks_cut(info.shape, parameter.placement.local_shape):
            raise UsageError(
                f"{slot.slot!r} of {parameter.name!r} has the shape {list(info.shape)}, the parameter "
                f"{list(parameter.placement.local_shape)}: if zero shards the state, give the distributed optimizer as "
                "well, optimizer="
            )
        return parameter.of(info.shape, info.dtype, self._neutral(slot))


def _looks_cut(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Return whether a slot may be a piece of one of this shape: a column as `LeafPiece.own_shape`."""
    is_column = len(shape) == len(whole) > 0 and all(size == 1 for size in shape[1:])
    return is_column and shape != whole and shape[0] > 1


def _others(record: OptimizerRecord) -> dict[str, Any]:
    """Return the values that were saved and belong to no parameter, by path."""
    found: dict[str, Any] = next(iter(record.groups.values()), {}).get("others", {})
    return found


def _is_plain(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, bool | int | float)
