"""Initialization of models that were built without memory (on PyTorch's `meta` device, or by Keras)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from unidist.errors import ConfigurationError

if TYPE_CHECKING:
    from unidist.strategy.interface import Plan


class InitializesModels(ABC):
    """Capability of a strategy: `attach` materializes a model built without memory, with equal values on all ranks."""

    @property
    @abstractmethod
    def initializes(self) -> bool:
        """True: with these options it does."""


def check_initialized_by(plan: Plan, tensor: str) -> None:
    """Find the strategy that initialises a model which was built without memory. Pure.

    Args:
        plan: of the run.
        tensor: name of one that has no memory.

    Raises:
        ConfigurationError: no strategy of the plan does; says which to use.
    """
    if plan.model_axes:
        raise ConfigurationError(
            f"the model was built without memory ({tensor!r} has no values), and is to be divided along "
            f"{', '.join(plan.model_axes)}, which takes a model with values. Use zero=3 without them, or build the "
            "model with values"
        )
    if not any(isinstance(item, InitializesModels) and item.initializes for item in plan.strategies):
        names = ", ".join(item.name for item in plan.strategies)
        raise ConfigurationError(
            f"the model was built without memory ({tensor!r} has no values), and the strategies of this run "
            f"({names}) take a model with values. Use --strategy zero=3, which initialises it part by part, or build "
            "the model with values (PyTorch: not on the meta device; Keras: not in unidist_zero.deferred())"
        )
