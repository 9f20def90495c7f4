"""The strategy `small-zero`: ZeRO-1 in its simplest form.

Gradients are added up on every rank, as in data parallelism. Then each rank updates its parameters, every n-th one, and
sends them to the others; so it keeps the optimizer state of its own only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unidist.buffer import HOST
from unidist.errors import ConfigurationError
from unidist.gradients import AllReduceExchange
from unidist.mesh import DATA_AXIS
from unidist.strategy import GradientOwner, ShardsUpdates, Strategy

if TYPE_CHECKING:
    from unidist.framework import Framework
    from unidist.gradients import ExchangeOptions, GradientExchange, ParameterInfo
    from unidist.optim import MakesInnerStep
    from unidist.runtime_api import RuntimeAPI


class SmallZeroBinding(ABC):
    """What `small-zero` needs of a framework; registered as `BindingSpec("small-zero", FRAMEWORK, path)`."""

    @abstractmethod
    def inner_step(self) -> MakesInnerStep:
        """Return what makes the inner step of one optimizer; see `BringsInnerStep.inner_step`."""


@dataclass(frozen=True)
class SmallZero(Strategy, GradientOwner, ShardsUpdates):
    """Shards the optimizer's state over the ranks, parameter by parameter."""

    name: ClassVar[str] = "small-zero"
    axis: ClassVar[str | None] = DATA_AXIS
    axis_order: ClassVar[int] = 50

    def make_exchange(
        self, parameters: Sequence[ParameterInfo], context: RuntimeAPI, framework: Framework, options: ExchangeOptions
    ) -> GradientExchange:
        """Add gradients up as data parallelism does."""
        options.check_supported_by(self.name)
        other = next((each.name for each in parameters if each.memory != HOST), None)
        if other is not None:
            raise ConfigurationError(f"{self.name} takes models in host memory; {other!r} is elsewhere. Use zero=1")
        return AllReduceExchange(parameters, framework=framework, host=options.communicator(context), options=options)

    def inner_step(self, framework: Framework, context: RuntimeAPI) -> MakesInnerStep:
        """Return what makes the inner step of one optimizer of this framework."""
        binding: SmallZeroBinding = context.plugins.binding(self.name, framework)
        return binding.inner_step()
