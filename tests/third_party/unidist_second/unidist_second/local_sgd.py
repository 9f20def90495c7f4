"""The strategy `local-sgd`: every rank trains by itself, and from time to time parameters are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from unidist.errors import ConfigurationError
from unidist.gradients import GradientExchange, LocalExchange, ParameterInfo
from unidist.mesh import DATA_AXIS
from unidist.strategy import GradientOwner, Strategy

if TYPE_CHECKING:
    from unidist.buffer import Buffer
    from unidist.framework import Framework
    from unidist.gradients import ExchangeOptions
    from unidist.optim import Update
    from unidist.runtime_api import RuntimeAPI
    from unidist.strategy import Plan


@dataclass
class LocalSGD(Strategy, GradientOwner):
    """Lets every rank train by itself, and averages parameters (Stich 2019, https://arxiv.org/abs/1805.09767).

    It has state, so it is no frozen dataclass; what is not an option is `field(init=False)`.

    Args:
        every: number of updates between two averages.
    """

    name: ClassVar[str] = "local-sgd"
    axis: ClassVar[str | None] = DATA_AXIS
    axis_order: ClassVar[int] = 50
    keeps_replicas: ClassVar[bool] = False

    every: int
    _since: int = field(default=0, init=False)
    _bound: list[tuple[Update, list[Buffer]]] = field(default_factory=list, init=False, repr=False)

    def validate(self, plan: Plan) -> None:
        """Check the option."""
        if self.every < 1:
            raise ConfigurationError(f"local-sgd={self.every}: give at least 1 update")

    def make_exchange(
        self, parameters: Sequence[ParameterInfo], context: RuntimeAPI, framework: Framework, options: ExchangeOptions
    ) -> GradientExchange:
        """Return an exchange that exchanges nothing."""
        options.check_supported_by(self.name)
        return LocalExchange(parameters, framework, options.num_ranks(context))

    def attach(self, model: Any, update: Update, framework: Framework) -> None:
        """Take note of the model that `distribute` has bound."""
        parameters = framework.parameters(model).values()
        self._bound.append((update, [framework.buffer(parameter) for parameter in parameters]))

    def on_step(self, step: int) -> None:
        """Average the parameters, if it is time to."""
        self._since += 1
        if self._since < self.every:
            return
        self._since = 0
        for update, parameters in self._bound:
            communicator = update.communicator
            works = [communicator.allreduce(each, each, scale=1 / communicator.size) for each in parameters]
            for work in works:
                work.wait()

    def state(self) -> dict[str, Any]:
        """Return how many updates there were since the last average."""
        return {"since": self._since}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self._since = state["since"]
