"""The state of a torch optimizer in a checkpoint: the slots of its parameters, counts and options."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from unidist.checkpoint.format.interface import (
    KeepsState,
    PlacesParameters,
    Plain,
    SavedSection,
    WholeParameters,
)
from unidist.checkpoint.format.optimizer_record import STEP, OptimizerRecord
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, Placement, TensorInfo, slot_name, split_slot
from unidist.checkpoint.format.slots import TORCH, OptimizerNaming
from unidist.errors import CheckpointError, UsageError
from unidist_torch.checkpoint.placements import ModulePlacements
from unidist_torch.checkpoint.tensors import piece_of, read_into
from unidist_torch.composed import check_composed, parts_of, sharing_groups
from unidist_torch.memory import TORCH_DTYPES, dtype_of
from unidist_torch.models.compiled_model import uncompiled, uncompiled_path
from unidist_torch.parameter_states import ParameterStates, scalar_dtype

MASTER = "master"
"""The slot by which a strategy that shards updates saves its copy of a 16-bit parameter in a wider type."""


class OptimizerState(KeepsState):
    """The state of an optimizer that every rank steps as a whole.

    Args:
        optimizer: bound or not.
        placements: of its parameters, by their identity; see `parameter_placements`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, placements: Mapping[int, Placement]) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError("the state of LBFGS cannot be saved: it belongs to no parameter. Save the model alone.")
        check_composed(optimizer)
        self._optimizer = optimizer
        self._states = ParameterStates(optimizer)
        self._placements = placements
        self._naming = naming_of(optimizer)
        self._namings = {
            id(parameter): naming_of(part)
            for part in parts_of(optimizer)
            for group in part.param_groups
            for parameter in group["params"]
        }

    @override
    def pieces(self) -> Sequence[Piece]:
        """Return the slots; none before the first step."""
        found = []
        for _, parameter in self._parameters():
            placement, naming = self._placements[id(parameter)], self._naming_of(parameter)
            for slot, value in self._states.slots(parameter).items():
                found.append(self._piece(placement, naming.neutral(slot), value, parameter))
        return found

    @override
    def values(self) -> dict[str, Plain]:
        record = OptimizerRecord(self._naming)
        for number, group in enumerate(self._optimizer.param_groups):
            record.groups[str(number)] = plain_options(group)
        for number, parameter in self._parameters():
            path = self._placements[id(parameter)].name
            record.group_of[path] = str(number)
            record.add_family(path, self._naming_of(parameter))
            if scalars := self._states.scalars(parameter):
                record.scalars[path] = scalars
        return record.values()

    @override
    def names(self) -> Collection[str]:
        return [self._placements[id(parameter)].name for _, parameter in self._parameters()]

    @override
    def check(self, section: SavedSection, *, strict: bool) -> None:
        parameters = {self._placements[id(each)].name: each for _, each in self._parameters()}
        placements = {path: self._placements[id(parameter)] for path, parameter in parameters.items()}
        record = OptimizerRecord.check(
            section, self._naming, placements, strict=strict, naming_of=lambda path: self._naming_of(parameters[path])
        )
        self._groups(record)
        for name in section.tensors:
            path, slot = split_slot(name)
            if path in parameters:
                self._factor(record, parameters[path], slot)

    @override
    def load(self, section: SavedSection, *, strict: bool) -> None:
        """Load by the optimizer's own `load_state_dict`, with its hooks."""
        self._load_whole(section, [parameter for _, parameter in self._parameters()])

    def _load_whole(self, section: SavedSection, parameters: Sequence[torch.Tensor]) -> None:
        """Load the state of some parameters, and the options of all; the others have no state afterwards."""
        wanted = set(map(id, parameters))
        record = OptimizerRecord.of(section.values)
        slots = self._slots_in(section, record)
        state: dict[int, dict[str, Any]] = {}
        scalars: list[tuple[torch.Tensor, str]] = []
        for index, (_, parameter) in enumerate(self._parameters()):
            if id(parameter) not in wanted:
                continue
            placement = self._placements[id(parameter)]
            entry: dict[str, Any] = {}
            for slot, number in self._scalars(record, parameter).items():
                entry[slot] = number if isinstance(number, int) else torch.tensor(number, dtype=scalar_dtype())
                if isinstance(entry[slot], torch.Tensor):
                    scalars.append((parameter, slot))
            for slot in slots.get(placement.name, ()):
                native = self._reading(record, parameter).native(slot)
                entry[native] = self._slot(section, record, parameter, slot, parameter)
            if entry:
                state[index] = entry
        self._load(state, self._groups(record))
        for parameter, slot in scalars:  # torch gives all but "step" the parameter's type, which a running one has not
            entry = self._states.of(parameter)
            entry[slot] = entry[slot].to(scalar_dtype())

    def _load(self, state: Mapping[int, Any], groups: list[dict[str, Any]]) -> None:
        """Load the state of all parameters, by their numbers; those within a composed optimizer load their own."""
        parts = parts_of(self._optimizer)
        if not parts:
            self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        with sharing_groups(self._optimizer):
            for part in parts:
                own, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
                numbers = [number for group in own for number in group["params"]]
                part.load_state_dict(
                    {"state": {number: state[number] for number in numbers if number in state}, "param_groups": own}
                )

    def _parameters(self) -> Iterator[tuple[int, torch.Tensor]]:
        for number, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                yield number, parameter

    def _piece(self, placement: Placement, slot: str, value: torch.Tensor, parameter: torch.Tensor) -> Piece:
        dtype = dtype_of(value)
        if tuple(value.shape) == placement.local_shape:
            return piece_of(placement.tensor(dtype, slot), placement.part(), value)
        if placement != Placement.whole(placement.name, placement.shape):
            raise UsageError(
                f"the slot {slot!r} of {placement.name!r} has the shape {list(value.shape)} and not its parameter's, "
                "which is spread over ranks: what it is of the whole is not known"
            )
        info = TensorInfo(slot_name(placement.name, slot), tuple(value.shape), dtype)
        return piece_of(info, Part.whole(info.shape), value)

    def _naming_of(self, parameter: torch.Tensor) -> OptimizerNaming:
        """Return the naming of a parameter: of the optimizer within that steps on it, by the slots that it has."""
        naming = self._namings.get(id(parameter), self._naming)
        return naming.of_parameter(self._slots_of(parameter)) if len(naming.families) > 1 else naming

    def _slots_of(self, parameter: torch.Tensor) -> Collection[str]:
        """Return the names of the slots that this rank has of a parameter."""
        return self._states.slots(parameter)

    def _reading(self, record: OptimizerRecord, parameter: torch.Tensor) -> OptimizerNaming:
        """Return the naming of a parameter whose state was saved."""
        return self._namings.get(id(parameter), self._naming).reading(
            record.naming_of(self._placements[id(parameter)].name)
        )

    def _slots_in(self, section: SavedSection, record: OptimizerRecord) -> dict[str, list[str]]:
        """Return the names of the slots that were saved and mean something here, by path of the parameter.

        Of another dialect's those that the table has.
        """
        namings = {
            self._placements[id(parameter)].name: self._reading(record, parameter)
            for _, parameter in self._parameters()
        }
        slots: dict[str, list[str]] = {}
        for name in sorted(section.tensors):
            path, slot = split_slot(name)
            if slot == MASTER or path not in namings:  # of the former the model has the same, rounded
                continue
            if record.naming.dialect == TORCH or namings[path].has_slot(slot):
                slots.setdefault(path, []).append(slot)
        return slots

    def _scalars(self, record: OptimizerRecord, parameter: torch.Tensor) -> dict[str, float]:
        """Return the numbers that were saved of a parameter, as far as they mean something here."""
        found = record.scalars.get(self._placements[id(parameter)].name, {})
        if record.naming.dialect == TORCH:
            return found
        return {STEP: found[STEP]} if STEP in found and self._reading(record, parameter).counts_steps else {}

    def _factor(self, record: OptimizerRecord, parameter: torch.Tensor, slot: str) -> float:
        path = self._placements[id(parameter)].name
        return self._reading(record, parameter).factor(slot, record.naming_of(path), record.options_of(path))

    def _slot(
        self, section: SavedSection, record: OptimizerRecord, parameter: torch.Tensor, slot: str, like: torch.Tensor
    ) -> torch.Tensor:
        """Return a slot of a parameter that was saved, in the type and the memory order of `like`."""
        placement = self._placements[id(parameter)]
        name = slot_name(placement.name, slot)
        info = section.tensors[name]
        dtype = like.dtype if info.dtype.is_floating else TORCH_DTYPES[info.dtype]
        if info.shape == placement.shape and placement.local_shape == tuple(like.shape):
            # In the parameter's memory order, which fused optimizers rely on.
            value, part = torch.empty_like(like, dtype=dtype, device="cpu"), placement.part()
        elif info.shape == placement.shape:  # the whole of it, of which the parameter here is a part
            value, part = torch.empty(placement.local_shape, dtype=dtype), placement.part()
        else:
            value, part = torch.empty(info.shape, dtype=dtype), Part.whole(info.shape)
        read_into(section, name, part, value)
        factor = self._factor(record, parameter, slot)
        return value if factor == 1.0 else value.mul_(factor)

    def _groups(self, record: OptimizerRecord) -> list[dict[str, Any]]:
        """Return the groups as `load_state_dict` wants them, with the options that were saved."""
        groups: list[dict[str, Any]] = []
        count = 0
        for group in self._optimizer.param_groups:
            paths = [self._placements[id(parameter)].name for parameter in group["params"]]
            numbers = list(dict.fromkeys(record.group_of[path] for path in paths if path in record.group_of))
            saved = [record.groups[number] for number in numbers]
            if any(options != saved[0] for options in saved[1:]):
                raise CheckpointError(
                    f"the parameters of one group here ({', '.join(paths[:3])}, ...) were in {len(saved)} groups with "
                    "different options when they were saved. Make the groups that were saved."
                )
            made = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            if saved:
                made |= _taken_options(record, saved[0], made, next(path for path in paths if path in record.group_of))
            groups.append({**made, "params": list(range(count, count + len(paths)))})
            count += len(paths)
        return groups


def parameter_placements(
    optimizer: torch.optim.Optimizer, models: Mapping[str, torch.nn.Module]
) -> dict[int, Placement]:
    """Return the placements of the parameters of an optimizer, by `id`.

    Args:
        optimizer: over parameters of the models.
        models: by prefix of their paths. Without any, parameters have the names that the optimizer was given, or
            numbers.

    Raises:
        UsageError: there are models, and a parameter is none of theirs.
    """
    paths: dict[int, tuple[str, str, PlacesParameters]] = {}
    for prefix, model in models.items():
        model = uncompiled(model)
        placements: PlacesParameters = ModulePlacements(model)
        for path, parameter in model.named_parameters():
            paths[id(parameter)] = (prefix, path, placements)
    found: dict[int, Placement] = {}
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for position, parameter in enumerate(group["params"]):
            prefix, path, placements = paths.get(id(parameter), ("", "", WholeParameters()))
            if not path and models:
                raise UsageError(
                    f"parameter {position} of group {number} of the optimizer is none of the models'. Save every model "
                    "whose parameters the optimizer updates: model={'a': ..., 'b': ...}"
                )
            path = path or (given[position] if given else f"{number}.{position}")
            placement = placements.placement(path, tuple(parameter.shape), dtype_of(parameter))
            placement = replace(placement, name=uncompiled_path(placement.name))
            found[id(parameter)] = placement.named_under(prefix)
    return found


def naming_of(optimizer: torch.optim.Optimizer) -> OptimizerNaming:
    """Return the names that an optimizer, bound or not, gives to its state."""
    kind = type(optimizer)
    return OptimizerNaming.of(TORCH, kind.__mro__[2] if hasattr(optimizer, "_unidist") else kind)


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group; a learning rate that is a tensor becomes a number.

    Values that are not plain (functions, say) are left out: the script gives them again.
    """
    found: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            found[key] = value.item()
        elif key not in ("params", "param_names") and _is_plain(value):
            found[key] = list(value) if isinstance(value, tuple) else value
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _taken_options(
    record: OptimizerRecord, saved: Mapping[str, Any], own: Mapping[str, Any], path: str
) -> dict[str, Any]:
    """Return the options that the checkpoint sets; of another dialect's the learning rate alone, of a parameter."""
    if record.naming.dialect != TORCH:
        rate = record.learning_rate(path)
        saved = {} if rate is None else {"lr": rate}
    taken: dict[str, Any] = {}
    for key, value in saved.items():
        current = own.get(key)
        if isinstance(current, torch.Tensor):
            value = torch.full_like(current, value)
        taken[key] = tuple(value) if isinstance(current, tuple) else value
    return taken
