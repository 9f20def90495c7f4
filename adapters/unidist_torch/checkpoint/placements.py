"""Finds where the parameters of a model belong, even if the model is a submodule of a distributed one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from unidist.buffer import DType
from unidist.checkpoint.format.interface import STATE_ATTRIBUTE, PlacesParameters, WholeParameters, placements_of
from unidist.checkpoint.format.pieces import Placement


class ModulePlacements(PlacesParameters):
    """The placements of a model, each parameter's as the outermost distributed module around it says.

    A script distributes the model, or a module of what it saves: the network in a LightningModule, the model in an
    object that averages weights.

    Args:
        model: any module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._within: dict[str, PlacesParameters] = {}
        for path, module in model.named_modules():
            if STATE_ATTRIBUTE in module.__dict__ and self._owner(path) is None:
                self._within[path] = placements_of(module)
        self._others = WholeParameters()

    @override
    def placement(self, path: str, shape: Sequence[int], dtype: DType) -> Placement:
        owner = self._owner(path)
        if owner is None:
            return self._others.placement(path, shape, dtype)
        found = self._within[owner].placement(_within(path, owner), shape, dtype)
        return found.named_under(owner)

    @override
    def copies(self, path: str) -> int:
        owner = self._owner(path)
        return 1 if owner is None else self._within[owner].copies(_within(path, owner))

    @override
    def gradient_axis(self, path: str) -> str:
        owner = self._owner(path)
        return (self._others if owner is None else self._within[owner]).gradient_axis(_within(path, owner or ""))

    @override
    def cut_axis(self, path: str) -> str | None:
        owner = self._owner(path)
        return None if owner is None else self._within[owner].cut_axis(_within(path, owner))

    def _owner(self, path: str) -> str | None:
        return next((each for each in self._within if not each or path.startswith(f"{each}.")), None)


def _within(path: str, owner: str) -> str:
    return path.removeprefix(f"{owner}.") if owner else path
