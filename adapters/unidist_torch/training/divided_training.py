"""The model of an elastic `TrainStep` that is divided over ranks, through the generations of the job.

A rank that stays keeps its part of the model, its parameters and its optimizer, and communicates with other ranks. A
rank that joins has the whole model, as the script has built it; it takes its part, as the others hold theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from unidist.control.elastic.member import is_alone
from unidist.elastic.rebinding import follow_generations
from unidist.errors import ConfigurationError
from unidist.negotiation.objects import gather_objects
from unidist.runtime import context as runtime_of_process
from unidist.strategy.interface import ChoosesPrecision, KeepsDivision
from unidist_torch.memory import memory_kind
from unidist_torch.training.distributed_optimizer import bind_model

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist.strategy.interface import Plan
    from unidist.strategy.plan import StrategyLike


class DividedTraining:
    """Divides a model and binds its optimizer: now, or when this rank joins the others.

    Args:
        model: whole.
        optimizer: over its parameters, not bound.
        strategy: see `TrainStep`.

    Attributes:
        model: this rank's; the whole one as long as it is alone.

    Raises:
        ConfigurationError: the strategies that divide the model are the script's own, of which the launcher does not
            know.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, strategy: StrategyLike) -> None:
        runtime = runtime_of_process.current()
        self.model = model
        self._optimizer: Any = optimizer
        self._strategy = strategy
        self._is_divided = False
        self._kinds = sorted({"host"} | {memory_kind(each).partition(":")[0] for each in model.parameters()})
        if not runtime.plan.divides_model:
            names = [item.name for item in self._plan.strategies if isinstance(item, KeepsDivision)]
            raise ConfigurationError(
                f"this job is elastic, and the script divides the model by {' and '.join(names)}. The launcher, which "
                "decides how many ranks train, has to know: give the strategy on its command line (--strategy)"
            )
        if not is_alone():
            self._bind(divide=None)
        follow_generations(self)

    def rebind(self, context: RuntimeAPI) -> None:
        """Go on in a new generation, see `unidist.elastic.rebinding.Rebindable`. Collective over all ranks."""
        dividing = [item for item in self._plan.innermost_first if isinstance(item, KeepsDivision)]
        own = [item.division(self.model, context) for item in dividing] if self._is_divided else None
        runtime = runtime_of_process.current()
        told: list[list[Any] | None] = gather_objects(runtime.world, own)
        known = next((each for each in told if each is not None), None)
        if known is None:  # all have just come, to go on from a checkpoint for example
            self._bind(divide=None)
            return
        for kind in self._kinds:
            runtime.divide(memory=kind)
        if self._is_divided:
            for item in dividing:
                item.rebind(self.model, context)
        if not self._is_divided:
            self._bind(divide=lambda: self._rejoined(context, known))
        elif not hasattr(self._optimizer, "_unidist"):  # the last generation ended before it was bound
            self._bind(divide=lambda: self.model)
        else:
            self._optimizer._unidist.rebind(context)

    @property
    def _plan(self) -> Plan:
        """The plan for the present ranks."""
        return runtime_of_process.current().plan_for(self._strategy)

    def _bind(self, *, divide: Callable[[], torch.nn.Module] | None) -> None:
        self.model = bind_model(
            self.model, self._optimizer, self._plan, in_backward=False, keeps_division=True, divide=divide
        )
        self._is_divided = True
        membership = runtime_of_process.current().membership
        assert membership is not None
        membership.remove_rebindable(self._optimizer._unidist)  # this does it, in an order that holds for all ranks

    def _rejoined(self, context: RuntimeAPI, divisions: Sequence[Any]) -> torch.nn.Module:
        """Return this rank's part of the model: what `Plan.prepare` does, by the choices of other ranks."""
        plan, left = self._plan, list(divisions)
        for chooser in plan.all(ChoosesPrecision):
            self.model = chooser.prepare(self.model, plan, context)
        for item in plan.innermost_first:
            if isinstance(item, KeepsDivision):
                self.model = item.rejoin(self.model, context, left.pop(0))
            else:
                self.model = item.partition(self.model, context)
        self._is_divided = True
        return self.model


def divides(strategy: StrategyLike) -> bool:
    """Return whether this is an elastic job whose strategies divide the model."""
    runtime = runtime_of_process.current()
    return runtime.is_elastic and runtime.plan_for(strategy).divides_model
