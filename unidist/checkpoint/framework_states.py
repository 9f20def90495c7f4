"""The interface by which an adapter reads and writes the state of models and optimizers for checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unidist.checkpoint.format.interface import KeepsState
    from unidist.checkpoint.format.pieces import Piece
    from unidist.framework import Framework
    from unidist.optim.update import Update

__all__ = ["FrameworkStates", "Model", "Optimizer"]

Model = Any
Optimizer = Any


class FrameworkStates(ABC):
    """An adapter's access to the state of ordinary models and optimizers, for which no plugin provides it.

    Attributes:
        framework: the adapter's.
    """

    framework: Framework

    @abstractmethod
    def model(self, model: Model) -> KeepsState:
        """Return the state of a model whose parameters this rank holds, placed as `placements_of(model)` says."""

    @abstractmethod
    def optimizer(self, optimizer: Optimizer, models: Mapping[str, Model]) -> KeepsState:
        """Return the state of an optimizer.

        Args:
            optimizer: the framework's own, bound or not.
            models: whose parameters it updates, by the prefix of their paths; may be empty.
        """

    @abstractmethod
    def random(self, rank: int, models: Mapping[str, Model]) -> KeepsState:
        """Return the state of this rank's random number generators, including those of its models."""

    @abstractmethod
    def piece(self, name: str, tensor: Any) -> Piece:
        """Return a whole tensor as a piece."""

    def update(self, optimizer: Optimizer) -> Update | None:
        """Return the framework-free part of a bound optimizer; None for one that is not bound."""
        return None

    @abstractmethod
    def prepare_to_load(self, optimizer: Optimizer) -> None:
        """Prepare an optimizer for `load`: complete a pending exchange, create its state. Collective."""
