"""The state of a Keras 3 optimizer in a checkpoint: the slots of its variables, counts and learning rate."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
from typing_extensions import override

from unidist.checkpoint.format.interface import KeepsState, Plain, SavedSection, placements_of
from unidist.checkpoint.format.optimizer_record import STEP, OptimizerRecord
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, Placement, TensorInfo, slot_name
from unidist.checkpoint.format.slots import KERAS, OptimizerNaming
from unidist.errors import CheckpointError, UsageError
from unidist_keras.checkpoint.names import stable_paths
from unidist_keras.checkpoint.tensors import dtype_of, piece_of, read_into
from unidist_keras.slots import slot_lists

_OPTIONS = "learning_rate"


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
        config = {key: value for key, value in self._inner.get_config().items() if _is_plain(value)}
        options = {**config, _OPTIONS: float(self._inner.learning_rate)}
        options["others"] = {name: float(each) for name, each in self._others().items()}
        record = OptimizerRecord(self._naming, {"0": options})
        for variable in self._variables():
            path = self._placement(variable).name
            record.group_of[path] = "0"
            if self._inner.built:
                record.scalars[path] = {STEP: float(self._inner.iterations)}
        return record.values()

    @override
    def names(self) -> Collection[str]:
        return [self._placement(variable).name for variable in self._variables()]

    @override
    def check(self, section: SavedSection, *, strict: bool) -> None:
        placements = [self._placement(variable) for variable in self._variables()]
        record = OptimizerRecord.check(
            section, self._naming, {placement.name: placement for placement in placements}, strict=strict
        )
        self._learning_rate(record)
        for placement in placements:
            for name in section.tensors:
                if name.startswith(slot_name(placement.name, "")):
                    slot = name.removeprefix(slot_name(placement.name, ""))
                    self._factor(slot, record, placement.name)

    @override
    def load(self, section: SavedSection, *, strict: bool) -> None:
        """Load, and build the optimizer first if there is state for it."""
        record = OptimizerRecord.of(section.values)
        if not self._inner.built:
            if not section.tensors and not record.steps:
                self._set_learning_rate(record)
                return
            with keras.name_scope(self._optimizer.name, caller=self._optimizer):
                self._optimizer.build(self._variables())
        fresh: dict[tuple[int, str], Any] | None = None
        for index, placement, slot, value in self._slots():
            place = self._place(placement, slot, value)
            if place is None:
                continue
            info, part = place
            if info.name in section.tensors:
                factor = self._factor(slot, record, placement.name)
                read_into(section, info.name, part, value, factor=factor)
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
        if not optimizer.built:
            return
        variables = self._variables()
        for attribute, kept in slot_lists(optimizer).items():
            for index, (variable, value) in enumerate(zip(variables, kept, strict=True)):
                if value is not None:
                    slot = slot_of(value, variable, attribute)
                    yield index, self._placement(variable), self._naming.neutral(slot), value

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
        """Return the factor for what was saved of a slot; with this optimizer's rate where none was saved."""
        rate = record.learning_rate(path)
        rate = float(self._inner.learning_rate) if rate is None else rate
        return self._naming.factor(slot, record.naming, rate)

    def _learning_rate(self, record: OptimizerRecord) -> float | None:
        rates = {record.learning_rate(path) for path in record.group_of}
        if len(rates) > 1:
            raise CheckpointError(
                f"the parameters were saved with different learning rates ({sorted(map(str, rates))}), and a Keras "
                "optimizer has one. Load the model alone, or save with one learning rate."
            )
        return next(iter(rates), None)

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
