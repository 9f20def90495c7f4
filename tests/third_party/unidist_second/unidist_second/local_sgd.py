"""The strategy `local-sgd`: every rank trains by itself, and from time to time parameters are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from unidist.errors import ConfigurationError
from unidist.gradients import GradientExchange, ParameterInfo, ReducedGradients, RoundResult
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
        return OwnGradients(parameters, framework, options.num_ranks(context))

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


class OwnGradients(GradientExchange):
    """Gives each rank its own gradients back.

    Args:
        parameters: whose gradients these are.
        framework: gives memory, and multiplies.
        num_ranks: part of `scale`, which makes a mean of a sum over so many ranks; here there is no such sum.
    """

    def __init__(self, parameters: Sequence[ParameterInfo], framework: Framework, num_ranks: int) -> None:
        self.parameters = tuple(parameters)
        self._framework, self._num_ranks = framework, num_ranks
        self._buffers = [framework.allocate(each.count, each.dtype, each.memory) for each in parameters]
        self._written: set[int] = set()

    def buffer(self, index: int) -> Buffer:
        """Return the place of a gradient."""
        return self._buffers[index]

    def ready(self, index: int) -> None:
        """Note that there is a gradient."""
        self._written.add(index)

    def accumulate(self, index: int) -> None:
        """Note that there is a gradient, to which more may be added."""
        self._written.add(index)

    def finish(self, *, scale: float | None = None, notice: int = 0) -> RoundResult:
        """Scale what there is. `scale` is the mean over passes, too, and one over the loss scale."""
        factor = (self.scale if scale is None else scale) * self._num_ranks
        for index, buffer in enumerate(self._buffers):
            if index not in self._written:
                self._framework.zero(buffer)  # so that no norm counts what an earlier round has left
            elif factor != 1.0:
                self._framework.multiply(buffer, factor)
        present = tuple(index in self._written for index in range(len(self._buffers)))
        self._written.clear()
        return RoundResult(present, notice)

    def reduced(self) -> ReducedGradients:
        """Return all gradients: rules clip each rank's own."""
        return ReducedGradients(tuple(buffer for buffer in self._buffers if buffer.count))

    @property
    def in_round(self) -> bool:
        """Say whether there are gradients of a round that is not complete."""
        return bool(self._written)

    def close(self) -> None:
        """Give the memory back."""
        self._buffers = []
