"""What a bound optimizer's `Update` and its strategies keep: how many updates there were, the scale of the loss."""

from __future__ import annotations

from collections.abc import Sequence

from unidist.checkpoint.format.interface import KeepsState, Plain, SavedSection
from unidist.checkpoint.format.pieces import Piece
from unidist.optim.update import Update

SECTION = "update"


class UpdateState(KeepsState):
    """The framework-free half of a distributed optimizer; equal on every rank.

    What only one of checkpoint and job has, of strategies and the scale of the loss, is left alone: a job with other
    strategies may load it.

    Args:
        update: of the optimizer.
    """

    def __init__(self, update: Update) -> None:
        self._update = update

    def pieces(self) -> Sequence[Piece]:
        """See `KeepsState.pieces`: there are none."""
        return ()

    def values(self) -> dict[str, Plain]:
        """See `KeepsState.values`."""
        scaler = self._update.scaler
        strategies = {strategy.name: strategy.state() for strategy in self._update.strategies}
        return {
            "step": self._update.step,
            "loss_scale": {} if scaler is None else scaler.state(),
            "strategies": {name: state for name, state in strategies.items() if state},
        }

    def check(self, section: SavedSection, *, strict: bool) -> None:
        """See `KeepsState.check`."""

    def load(self, section: SavedSection, *, strict: bool) -> None:
        """See `KeepsState.load`."""
        values = section.values
        self._update.step = int(values["step"])
        scaler = self._update.scaler
        if scaler is not None and values["loss_scale"]:
            scaler.load_state(values["loss_scale"])
        for strategy in self._update.strategies:
            if strategy.name in values["strategies"]:
                strategy.load_state(values["strategies"][strategy.name])
