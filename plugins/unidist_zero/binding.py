"""Interface between the strategy `zero` and a framework, registered as `BindingSpec("zero", FRAMEWORK, path)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from unidist.optim.interface import MakesInnerStep
    from unidist.optim.update import Update
    from unidist.runtime_api import RuntimeAPI
    from unidist_zero.strategy import Zero


class ZeroBinding(ABC):
    """ZeRO for one framework. Made without arguments.

    Attributes:
        unsupported: options of the strategy that are for models of another framework.
    """

    unsupported: ClassVar[tuple[str, ...]] = ("sparse",)

    @abstractmethod
    def inner_step(self, strategy: Zero) -> MakesInnerStep:
        """Return a factory of inner steps, one for each optimizer; see `BringsInnerStep.inner_step`.

        Raises:
            ConfigurationError: an option does not work with this framework.
        """

    def partition(self, strategy: Zero, model: Any, context: RuntimeAPI) -> Any:
        """Prepare a model for stage 3, before its optimizer is bound; see `Strategy.partition`.

        By default does nothing. Collective over the data axis when first called.
        """
        return model

    @abstractmethod
    def attach(self, strategy: Zero, model: Any, update: Update) -> None:
        """Shard a model at stage 3, or initialize it, when the optimizer is bound; see `Strategy.attach`.

        Raises:
            ConfigurationError: models of this framework cannot be sharded in this way.
        """
