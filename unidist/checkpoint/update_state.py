"""Checkpoint state of a bound optimizer's `Update` and its strategies: number of updates, loss scale, tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from unidist.buffer import Buffer
from unidist.checkpoint.format.interface import KeepsState, Plain, SavedSection
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece
from unidist.optim.interface import KeepsTensors
from unidist.optim.update import Update

SECTION = "update"
_OF = ":"  # between the name of a strategy and that of a tensor of its state


class UpdateState(KeepsState):
    """The framework-free part of a distributed optimizer; equal on every rank.

    What only one of checkpoint and job has, of strategies and the scale of the loss, is left alone: a job with other
    strategies may load it.

    Args:
        update: of the optimizer.
    """

    def __init__(self, update: Update) -> None:
        self._update = update

    @override
    def pieces(self) -> Sequence[Piece]:
        return [
            Piece.whole(f"{follower.name}{_OF}{name}", shape, memory)
            for follower in self._keepers
            for name, (shape, memory) in follower.tensors().items()
        ]

    @property
    def _keepers(self) -> list[Any]:
        return [follower for follower in self._update.strategies if isinstance(follower, KeepsTensors)]

    @override
    def values(self) -> dict[str, Plain]:
        scaler = self._update.scaler
        strategies = {strategy.name: strategy.state() for strategy in self._update.strategies}
        return {
            "step": self._update.step,
            "loss_scale": {} if scaler is None else scaler.state(),
            "strategies": {name: state for name, state in strategies.items() if state},
        }

    @override
    def check(self, section: SavedSection, *, strict: bool) -> None:
        """Accept every section: the values need no check."""

    @override
    def load(self, section: SavedSection, *, strict: bool) -> None:
        self.load_values(section.values)
        for follower in self._keepers:
            found = {}
            for name, info in section.tensors.items():
                if name.startswith(prefix := f"{follower.name}{_OF}"):
                    memory = Buffer.allocate(info.count, info.dtype)
                    section.read(name, Part.whole(info.shape), memory)
                    found[name.removeprefix(prefix)] = (info.shape, memory)
            if found:
                follower.load_tensors(found)

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Restore what `values` returned, in a job of any size: for checkpoints of another format."""
        self._update.step = int(values["step"])
        scaler = self._update.scaler
        if scaler is not None and values["loss_scale"]:
            scaler.load_state(values["loss_scale"])
        for strategy in self._update.strategies:
            if strategy.name in values["strategies"]:
                strategy.load_state(values["strategies"][strategy.name])
