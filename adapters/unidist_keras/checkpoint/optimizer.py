"""The state of a Keras 3 optimizer in a checkpoint: the slots of its variables, counts and learning rate."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
from typing_extensions import override

from unidist.checkpoint.format.interface import KeepsState, Plain, SavedSection, placements_of
from unidist.checkpoint.format.optimizer_record import STEP, OptimizerRecord
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, Placement, TensorInfo, slot_name, split_slot
from unidist.checkpoint.format.slots import KERAS, OptimizerNaming
from unidist.errors import CheckpointError, UsageError
from unidist_keras.checkpoint.names import stable_paths
from unidist_keras.checkpoint.tensors import dtype_of, piece_of, read_into
from unidist_keras.slots import slot_lists

_RATE = "learning_rate"


class OptimizerState(KeepsState):
    """The state of an optimizer that every rank steps as a whole.

    Args:
        optimizer: of Keras 3, bound or not, perhaps a LossScaleOptimizer.
        models: whose variables it updates, by prefix of their paths.
    """

    def __init__(self, optimizer: Any, models: Mapping[str, Any]) -> None:
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise UsageError(
                f"optimizer: {type(optimizer).__name__} is no optimizer of Keras 3; those of tf_keras cannot be saved"
            )
        self._optimizer = optimizer
        self._models = models
        self._naming = OptimizerNaming.of(KERAS, plain_class(self._inner))
        self._namings: dict[str, OptimizerNaming] = {}
        self._placements: dict[int, Placement] = {}
        for prefix, model in models.items():
            places = placements_of(model)
            for path, variable in stable_paths(model.weights).items():
                placement = places.placement(path, tuple(variable.shape), dtype_of(variable))
                self._placements[id(variable)] = placement.named_under(prefix)

    @property
    def _inner(self) -> Any:
        return getattr(self._optimizer, "inner_optimizer", self._optimizer)

    @override
    def pieces(self) -> Sequence[Piece]:
        """Return the slots; none before the optimizer is built."""
        found = []
        for _, placement, slot, value in self._slots():
            place = self._place(placement, slot, value)
            if place is not None:
                found.append(piece_of(*place, value))
        return found

    @override
    def values(self) -> dict[str, Plain]:
        options = self._options()
        options["others"] = {name: float(each) for name, each in self._others().items()}
        record = OptimizerRecord(self._naming, {"0": options})
        for variable in self._variables():
            path = self._placement(variable).name
            record.group_of[path] = "0"
            record.add_family(path, self._naming_of(path))
            if self._inner.built:
                record.scalars[path] = {STEP: float(self._inner.iterations)}
        return record.values()

    @override
    def names(self) -> Collection[str]:
        return [self._placement(variable).name for variable in self._variables()]

    @override
    def check(self, section: SavedSection, *, strict: bool) -> None:
        if len(self._naming.families) > 1 and section.tensors:
            self._build()  # which tells what it does with which variable
        placements = {each.name: each for each in map(self._placement, self._variables())}
        record = OptimizerRecord.check(section, self._naming, placements, strict=strict, naming_of=self._naming_of)
        self._learning_rate(record)
        for name in section.tensors:
            path, slot = split_slot(name)
            if path in placements:
                self._factor(slot, record, path)

    @override
    def load(self, section: SavedSection, *, strict: bool) -> None:
        """Load, and build the optimizer first if there is state for it."""
        record = OptimizerRecord.of(section.values)
        if not self._inner.built:
            if not section.tensors and not record.steps:
                self._set_learning_rate(record)
                return
            self._build()
        fresh: dict[tuple[int, str], Any] | None = None
        for index, placement, slot, value in self._slots():
            place = self._place(placement, slot, value)
            if place is None:
                continue
            part, name = place[1], self._saved_name(record, placement.name, slot)
            if name in section.tensors:
                factor = self._factor(slot, record, placement.name)
                read_into(section, name, part, value, factor=factor)
            else:
                fresh = self._fresh() if fresh is None else fresh
                value.assign(fresh[index, slot])
        self._load_numbers(record)

    def _load_numbers(self, record: OptimizerRecord) -> None:
        """Load the values that belong to no variable of the model."""
        self._inner.iterations.assign(record.steps)
        self._set_learning_rate(record)
        if record.naming.dialect == KERAS:
            saved = next(iter(record.groups.values()), {}).get("others", {})
            for name, variable in self._others().items():
                if name in saved:
                    variable.assign(saved[name])

    def _variables(self) -> list[Any]:
        """Return the variables that the optimizer updates, or will update."""
        if self._inner.built:
            return list(self._inner._trainable_variables)
        return list({id(each): each for model in self._models.values() for each in model.trainable_variables}.values())

    def _placement(self, variable: Any) -> Placement:
        if id(variable) not in self._placements:
            raise UsageError(
                f"the optimizer updates {getattr(variable, 'path', variable.name)!r}, which is none of the models'. "
                "Save every model whose variables the optimizer updates: model={'a': ..., 'b': ...}"
            )
        return self._placements[id(variable)]

    def _slots(self, optimizer: Any = None) -> Iterator[tuple[int, Placement, str, Any]]:
        """Yield number and placement of a variable, the neutral name of a slot, and the variable that holds it."""
        optimizer = self._inner if optimizer is None else optimizer
        for index, (placement, slots) in enumerate(self._native_slots(optimizer)):
            naming = self._naming.of_parameter(slots)
            for slot, value in slots.items():
                yield index, placement, naming.neutral(slot), value

    def _native_slots(self, optimizer: Any) -> Iterator[tuple[Placement, dict[str, Any]]]:
        """Yield for each variable its placement, and what holds its slots, by Keras' names; none before it is built."""
        lists = slot_lists(optimizer) if optimizer.built else {}
        for index, variable in enumerate(self._variables()):
            slots = {}
            for attribute, kept in lists.items():
                if kept[index] is not None:
                    slots[slot_of(kept[index], variable, attribute)] = kept[index]
            yield self._placement(variable), slots

    def _naming_of(self, path: str) -> OptimizerNaming:
        """Return the naming of a variable's slots, by those that the optimizer has for it."""
        if len(self._naming.families) < 2 or not self._inner.built:
            return self._naming
        if not self._namings:
            for placement, slots in self._native_slots(self._inner):
                self._namings[placement.name] = self._naming.of_parameter(slots)
        return self._namings.get(path, self._naming)

    def _saved_name(self, record: OptimizerRecord, path: str, slot: str) -> str:
        """Return the name under which a slot with this neutral name was saved."""
        return slot_name(path, record.slot_of(path, slot, self._naming_of(path)))

    def _build(self) -> None:
        if not self._inner.built:
            with keras.name_scope(self._optimizer.name, caller=self._optimizer):
                self._optimizer.build(self._variables())

    def _place(self, placement: Placement, slot: str, value: Any) -> tuple[TensorInfo, Part] | None:
        """Return which part of which tensor a slot is; None if it stands for nothing."""
        local = placement.local_shape
        if tuple(value.shape) == local:
            return placement.tensor(dtype_of(value), slot), placement.part()
        if placement != Placement.whole(placement.name, local):
            raise UsageError(
                f"the slot {slot!r} of {placement.name!r} has the shape {list(value.shape)} and not its variable's, "
                "which is spread over ranks: what it is of the whole is not known"
            )
        info = TensorInfo(slot_name(placement.name, slot), tuple(value.shape), dtype_of(value))
        return info, Part.whole(info.shape)

    def _others(self) -> dict[str, Any]:
        """Return its scalar variables that belong to no variable of the model, by name."""
        if not self._inner.built:
            return {}
        slots = {id(value) for _, _, _, value in self._slots()}
        found = {}
        for owner, prefix in ((self._inner, ""), (self._optimizer, "outer.")):
            if prefix and owner is self._inner:
                continue
            known = {id(self._inner.iterations), *slots}
            if prefix:
                known |= {id(each) for each in self._inner.variables}
            for attribute, value in vars(owner).items():
                is_number = isinstance(value, keras.Variable) and not tuple(value.shape)
                if is_number and id(value) not in known and attribute != "_learning_rate":
                    found[f"{prefix}{attribute}"] = value
        return found

    def _fresh(self) -> dict[tuple[int, str], Any]:
        """Return the values of the slots before the first update."""
        made = plain_class(self._inner).from_config(self._inner.get_config())
        made.build(list(self._inner._trainable_variables))
        return {(index, slot): value.value for index, _, slot, value in self._slots(made)}

    def _factor(self, slot: str, record: OptimizerRecord, path: str) -> float:
        """Return the factor for what was saved of a slot; with this optimizer's options where none was saved."""
        if record.naming.dialect == KERAS:
            return 1.0
        saved, options = record.naming_of(path), record.options_of(path)
        own = self._naming_of(path).numbers(self._options())
        if options["learning_rate"] is not None:
            own["learning_rate"] = options["learning_rate"]  # which it takes over
        return self._naming_of(path).reading(saved).factor(slot, saved, options, own)

    def _options(self) -> dict[str, Any]:
        """Return its plain options, with the present learning rate."""
        config = {key: value for key, value in self._inner.get_config().items() if _is_plain(value)}
        return {**config, _RATE: float(self._inner.learning_rate)}

    def _learning_rate(self, record: OptimizerRecord) -> float | None:
        """Return the learning rate that was saved, by which those of all variables are right."""
        own, rates = self._options(), set()
        for path in record.group_of.keys() & set(self.names()):
            rate, ratio = record.learning_rate(path), self._naming_of(path).option(own, "learning_rate_ratio")
            rates.add(rate / float(str(ratio)) if rate is not None and ratio else rate)
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(rates) > 1 or any(not math.isclose(rate, known[0], rel_tol=1e-6) for rate in known):
            raise CheckpointError(
                f"the parameters were saved with different learning rates ({sorted(map(str, rates))}), and a Keras "
                "optimizer has one. Load the model alone, or save with one learning rate; adam_lr_ratio= of Muon can "
                "be the ratio of two."
            )
        return known[0] if known else None

    def _set_learning_rate(self, record: OptimizerRecord) -> None:
        rate = self._learning_rate(record)
        if rate is not None and not isinstance(self._inner.get_config()["learning_rate"], dict):  # a schedule stays
            self._inner.learning_rate = rate


def plain_class(optimizer: Any) -> type[Any]:
    """Return the optimizer's class before it was bound."""
    found: type[Any] = getattr(type(optimizer), "_unidist_plain", type(optimizer))
    return found


def slot_of(value: Any, variable: Any, attribute: str) -> str:
    """Return Keras' name of a slot, which follows the model variable's in the name of the slot's variable."""
    prefix = str(variable.path).replace("/", "_") + "_"
    name = str(value.name)
    return name.removeprefix(prefix) if name.startswith(prefix) else attribute.strip("_")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
