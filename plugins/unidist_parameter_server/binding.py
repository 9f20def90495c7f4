"""Interface between the strategy and a framework, registered as `BindingSpec("parameter_server", FRAMEWORK, path)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from unidist.optim import MakesInnerStep
    from unidist.runtime_api import RuntimeAPI
    from unidist_parameter_server.strategy import ParameterServer


class StoreStep(Protocol):
    """Requirements of the strategy on an inner step.

    Attributes:
        before: in an elastic job the optimizer's step of the generation before, whose store has the parameters, until
            this generation has them; else None.
    """

    before: StoreStep | None

    @property
    def is_filled(self) -> bool:
        """Whether the store has this rank's parameters."""

    def is_of(self, context: RuntimeAPI) -> bool:
        """Return whether the store is of this runtime."""

    def bring(self) -> None:
        """Bring the store's parameters and the optimizer's state to this rank. Not collective."""

    def before_commit(self) -> None:
        """Bring what the state of an elastic job reads, if reading it does not do that. Not collective."""

    def close(self) -> None:
        """Leave the store."""

    def pull(self) -> None:
        """Bring the newest parameters into the model of this rank. Not collective; nothing before the first update."""

    def settle(self) -> None:
        """Push what was not pushed, and make the parameters of all ranks equal: those of the store. Collective."""


class ParameterServerBinding(ABC):
    """The strategy for one framework. Made without arguments."""

    @abstractmethod
    def inner_step(self, strategy: ParameterServer) -> MakesInnerStep:
        """Return a factory of inner steps, each a `StoreStep`, one for each optimizer.

        Creating one raises ConfigurationError where the store has no counterpart of the optimizer; see
        `BringsInnerStep.inner_step`.
        """
