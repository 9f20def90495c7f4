"""The strategy `local-sgd`: every rank trains by itself, and from time to time parameters are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unidist.errors import ConfigurationError
from unidist.gradients import GradientExchange, LocalExchange, ParameterInfo
from unidist.mesh import DATA_AXIS
from unidist.optim import ActsOnParameters
from unidist.strategy import GradientOwner, Strategy

if TYPE_CHECKING:
    from unidist.framework import Framework
    from unidist.gradients import ExchangeOptions
    from unidist.optim import TrainedState, Update
    from unidist.runtime_api import RuntimeAPI
    from unidist.strategy import Plan


@dataclass(frozen=True)
class LocalSGD(Strategy, GradientOwner, ActsOnParameters):
    """Lets every rank train by itself, and averages parameters (Stich 2019, https://arxiv.org/abs/1805.09767).

    Args:
        every: number of updates between two averages.
    """

    name: ClassVar[str] = "local-sgd"
    axis: ClassVar[str | None] = DATA_AXIS
    axis_order: ClassVar[int] = 50
    keeps_replicas: ClassVar[bool] = False

    every: int

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

    def acts_after(self, step: int, update: Update) -> bool:
        """Return whether it is time to average."""
        return step % self.every == 0

    def act_after(self, step: int, update: Update, state: TrainedState) -> None:
        """Average the parameters."""
        values = state.values()
        works = [update.communicator.allreduce(each, each, scale=1 / update.communicator.size) for each in values]
        for work in works:
            work.wait()
        state.store(values)
