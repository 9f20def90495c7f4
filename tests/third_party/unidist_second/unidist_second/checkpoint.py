"""Checkpoints and elastic jobs: the state of models and optimizers, as pieces that any framework can load."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from unidist.checkpoint import CheckpointObjects, FrameworkStates, RandomState, load_job, save_job
from unidist.checkpoint.format import (
    TORCH,
    KeepsState,
    MemoryState,
    OptimizerNaming,
    OptimizerRecord,
    Piece,
    Placement,
    SavedSection,
    TensorInfo,
    slot_name,
)
from unidist.elastic import ObjectState, divided_handlers
from unidist.optim import Update
from unidist_second.binding import whole_velocities
from unidist_second.framework import NumpyFramework
from unidist_second.models import SGD, Model

_VELOCITY = "gradient_momentum"
_NAMING = OptimizerNaming(TORCH, ("SGD",))  # this SGD computes what PyTorch's does, so either loads the other's


class NumpyStates(FrameworkStates):
    """The states of numpy's models and optimizers."""

    framework = NumpyFramework()

    def model(self, model: Model) -> KeepsState:
        """Return the state of all arrays, which are loaded in place."""
        return MemoryState([self.piece(name, array) for name, array in model.arrays.items()])

    def optimizer(self, optimizer: SGD, models: Mapping[str, Model]) -> KeepsState:
        """Return the state of velocities and options."""
        return SGDState(optimizer)

    def random(self, rank: int, models: Mapping[str, Model]) -> KeepsState:
        """Return Python's and numpy's generators."""
        return RandomState(rank)

    def piece(self, name: str, tensor: Any) -> Piece:
        """Return a whole array."""
        return Piece.whole(name, tensor.shape, self.framework.buffer(tensor))

    def update(self, optimizer: SGD) -> Update | None:
        """Return the update of a bound optimizer."""
        return None if optimizer.binding is None else optimizer.binding.distributed_update

    def prepare_to_load(self, optimizer: SGD) -> None:
        """Nothing is pending between two steps."""


class SGDState(KeepsState):
    """The state of an optimizer: all of it, or this rank's pieces."""

    def __init__(self, optimizer: SGD) -> None:
        self._optimizer = optimizer

    def pieces(self) -> Sequence[Piece]:
        """Return this rank's velocities."""
        return self._pieces(make=False)

    def values(self) -> dict[str, Any]:
        """Return the options, and which parameters there are."""
        options = {"lr": self._optimizer.lr, "momentum": self._optimizer.momentum}
        return OptimizerRecord(_NAMING, {"0": options}, dict.fromkeys(self._optimizer.parameters, "0")).values()

    def names(self) -> Collection[str]:
        """Return the parameters' names."""
        return self._optimizer.parameters

    def check(self, section: SavedSection, *, strict: bool) -> None:
        """Raise CheckpointError if the section is of another optimizer, or of other parameters."""
        arrays = self._optimizer.parameters
        places = {name: Placement.whole(name, array.shape) for name, array in arrays.items()}
        OptimizerRecord.check(section, _NAMING, places, strict=strict)

    def load(self, section: SavedSection, *, strict: bool) -> None:
        """Take the options, and the velocities that were saved; the others are zeros."""
        options = OptimizerRecord.of(section.values).groups.get("0", {})
        self._optimizer.lr = options.get("lr", self._optimizer.lr)
        self._optimizer.momentum = options.get("momentum", self._optimizer.momentum)
        for piece in self._pieces(make=True):
            if piece.tensor.name in section.tensors:
                section.read(piece.tensor.name, piece.part, piece.memory)

    def _pieces(self, *, make: bool) -> list[Piece]:
        binding, framework, arrays = self._optimizer.binding, NumpyFramework(), self._optimizer.parameters
        held = binding.inner.velocities(make=make) if binding else whole_velocities(self._optimizer, make=make)
        return [
            Piece(
                TensorInfo(slot_name(name, _VELOCITY), arrays[name].shape, framework.dtype(array)),
                part,
                framework.buffer(np.ascontiguousarray(array)),
            )
            for name, part, array in held
        ]


def save(path: str | os.PathLike[str], model: Model, optimizer: SGD, *, step: int | None = None) -> None:
    """Save a checkpoint. Collective."""
    objects = CheckpointObjects(model, optimizer)
    options: Any = {"extra": None, "keep": None, "asynchronous": False, "on_error": "raise", "rng": False}
    save_job(NumpyStates(), path, objects, step=step, **options)


def load(path: str | os.PathLike[str], model: Model, optimizer: SGD) -> int | None:
    """Load a checkpoint of numpy or of PyTorch; returns its step. Collective."""
    objects = CheckpointObjects(model, optimizer)
    return load_job(NumpyStates(), path, objects, strict=True, mapping=None, rng=False).step


class ArrayState(ObjectState):
    """State of an elastic job: `ArrayState(model, optimizer, epoch=0)`."""

    def __init__(self, model: Model, optimizer: SGD, **values: Any) -> None:
        handlers = divided_handlers(NumpyStates(), model, optimizer, is_sharded=has_sharded_state)
        super().__init__(handlers=handlers, **values)


def has_sharded_state(optimizer: SGD) -> bool:
    """Return whether the optimizer is bound, and each rank has a share of its state."""
    return optimizer.binding is not None and optimizer.binding.inner.sharded
