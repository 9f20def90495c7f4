"""Ordinary torch models, optimizers and random generators as the states of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from unidist.checkpoint.format.interface import STATE_ATTRIBUTE, KeepsState, Plain, SavedSection
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, TensorInfo
from unidist.checkpoint.framework_states import FrameworkStates
from unidist.checkpoint.rng import RandomState
from unidist.errors import UsageError
from unidist.optim.update import Update, update_of
from unidist_torch.checkpoint.optimizer import OptimizerState, parameter_placements
from unidist_torch.checkpoint.placements import ModulePlacements
from unidist_torch.checkpoint.tensors import piece_of, read_into
from unidist_torch.framework import TorchFramework
from unidist_torch.memory import buffer_of, dtype_of
from unidist_torch.models.compiled_model import uncompiled, uncompiled_path


class HoldsParameters(ABC):
    """Capability of an object attached to a module: holds its parameters elsewhere, and provides their state."""

    @abstractmethod
    def state_of(self, model: torch.nn.Module) -> KeepsState:
        """Return the state of a model that the module is, or is a part of."""


class TorchStates(FrameworkStates):
    """The states of torch models, optimizers and random generators."""

    framework = TorchFramework()

    @override
    def model(self, model: torch.nn.Module) -> KeepsState:
        attached = [module.__dict__.get(STATE_ATTRIBUTE) for module in model.modules()]
        holders = [each for each in attached if isinstance(each, HoldsParameters)]
        if len(holders) > 1:
            raise UsageError(
                f"{len(holders)} modules of this {type(model).__name__} were distributed, each with shards of its "
                "own: give each by name, model={'generator': model.generator, ...}"
            )
        return holders[0].state_of(model) if holders else ModelState(model)

    @override
    def optimizer(self, optimizer: torch.optim.Optimizer, models: Mapping[str, torch.nn.Module]) -> KeepsState:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"optimizer: {type(optimizer).__name__} is no optimizer of PyTorch")
        placements = parameter_placements(optimizer, models)
        binding = getattr(optimizer, "_unidist", None)
        sharded = None if binding is None else binding.kept_state(placements)
        return OptimizerState(optimizer, placements) if sharded is None else sharded

    @override
    def random(self, rank: int, models: Mapping[str, torch.nn.Module]) -> KeepsState:
        return TorchRandom(rank)

    @override
    def piece(self, name: str, tensor: torch.Tensor) -> Piece:
        return piece_of(TensorInfo(name, tuple(tensor.shape), dtype_of(tensor)), Part.whole(tensor.shape), tensor)

    @override
    def update(self, optimizer: Any) -> Update | None:
        return update_of(optimizer)

    @override
    def prepare_to_load(self, optimizer: Any) -> None:
        binding = getattr(optimizer, "_unidist", None)
        if binding is not None:
            binding.complete_exchange()


class ModelState(KeepsState):
    """Parameters, persistent buffers, and the extra state of modules.

    Args:
        model: whose `state_dict` names them; a tensor in several modules is saved once, under its first name.
            Names are those of the same model without `torch.compile`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model = uncompiled(model)
        self._placements = ModulePlacements(model)
        self._tensors: dict[str, torch.Tensor] = {}
        self._others: dict[str, Any] = {}
        seen: set[int] = set()
        for path, value in model.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                self._others[path] = value
            elif id(value) not in seen:
                seen.add(id(value))
                self._tensors[path] = value

    @override
    def pieces(self) -> Sequence[Piece]:
        return [piece_of(info, part, self._tensors[path]) for path, info, part in self._places()]

    @override
    def values(self) -> dict[str, Plain]:
        return {"extra_state": self._others} if self._others else {}

    @override
    def names(self) -> Collection[str]:
        return [info.name for _, info, _ in self._places()]

    @override
    def check(self, section: SavedSection, *, strict: bool) -> None:
        section.match([info for _, info, _ in self._places()], strict=strict)
        for path, tensor in self._tensors.items():
            if tensor.is_meta:
                raise UsageError(f"{path!r} is on the meta device; give the model memory with to_empty() before load()")

    @override
    def load(self, section: SavedSection, *, strict: bool) -> None:
        for path, info, part in self._places():
            if info.name in section.tensors:
                read_into(section, info.name, part, self._tensors[path])
        others = section.values.get("extra_state", {})
        known = {path: others[path] for path in self._others if path in others}
        if known:
            self._model.load_state_dict(known, strict=False)

    def _places(self) -> Iterator[tuple[str, TensorInfo, Part]]:
        for path, tensor in self._tensors.items():
            dtype = dtype_of(tensor)
            placement = self._placements.placement(path, tuple(tensor.shape), dtype)
            placement = replace(placement, name=uncompiled_path(placement.name))
            yield path, placement.tensor(dtype), placement.part()


class TorchRandom(RandomState):
    """The generators of torch, on the CPU and on CUDA devices, beside Python's and numpy's."""

    @override
    def tensors(self) -> Sequence[Piece]:
        states = {"torch": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["torch.cuda"] = torch.cuda.get_rng_state()
        return [Piece.whole(self.name(name), tuple(state.shape), buffer_of(state)) for name, state in states.items()]

    @override
    def set_tensor(self, generator: str, section: SavedSection, name: str) -> None:
        state = torch.empty(section.tensors[name].shape, dtype=torch.uint8)
        read_into(section, name, Part.whole(state.shape), state)
        if generator == "torch":
            torch.set_rng_state(state)
        elif generator == "torch.cuda" and torch.cuda.is_available():
            torch.cuda.set_rng_state(state)
