"""What the strategy `zero` asks of its binding to a framework, registered as `BindingSpec("zero", FRAMEWORK, path)`."""

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

    unsupported: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def inner_step(self, strategy: Zero) -> MakesInnerStep:
        """Return what makes the inner step of one optimizer, see `ShardsUpdates.inner_step`.

        Raises:
            ConfigurationError: an option does not work with this framework.
        """

    def partition(self, strategy: Zero, model: Any, context: RuntimeAPI) -> Any:
        """Prepare a model for stage 3 before its optimizer is bound; see `Strategy.partition`. The default does nothing.

        Collective over the data axis where that is first asked for.
        """
        return model

    @abstractmethod
    def attach(self, strategy: Zero, model: Any, update: Update) -> None:
        """Divide a model at stage 3, or give it its values, when the optimizer is bound; see `Strategy.attach`.

        Raises:
            ConfigurationError: models of this framework cannot be divided so.
        """
