"""A model that is divided over ranks, through the generations of an elastic job. Adapters derive from it.

A rank that stays keeps its part of the model, its parameters and its optimizer, and communicates with other ranks. A
rank that joins has the whole model, as the script has built it; it takes its part, as the others hold theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unidist.control.elastic.member import is_alone
from unidist.elastic.rebinding import Rebindable, follow_generations
from unidist.errors import ConfigurationError
from unidist.negotiation.objects import gather_objects
from unidist.runtime import context as runtime_of_process
from unidist.strategy.interface import KeepsDivision

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist.strategy.interface import Plan
    from unidist.strategy.plan import StrategyLike

Divide = Callable[[], Any]


class DividedTraining(Rebindable, ABC):
    """Divides a model and binds its optimizer: at once, by `begin`, or when this rank joins the others.

    Args:
        model: whole.
        strategy: a strategy line, strategy objects, or None: the command line's.

    Attributes:
        model: this rank's part; as long as the rank is alone, what will be its part.
        memory_kinds: of the tensors that are exchanged.

    Raises:
        ConfigurationError: the strategies that divide the model are the script's own, of which the launcher does not
            know.
    """

    memory_kinds: Sequence[str] = ("host",)

    def __init__(self, model: Any, strategy: StrategyLike) -> None:
        self.model = self._whole = model
        self._strategy = strategy
        self._is_divided = False
        check_is_known(self._plan, runtime_of_process.current().plan)

    @abstractmethod
    def bind(self, plan: Plan, divide: Divide | None) -> Any:
        """Divide the model, and bind the optimizer; returns this rank's part. Collective.

        Args:
            plan: for the present ranks.
            divide: returns the part, as others hold theirs already; None: the plan divides the model on all ranks now.
        """

    @abstractmethod
    def rebind_optimizer(self, context: RuntimeAPI) -> bool:
        """Let the optimizer exchange with the ranks of a new generation; False if it was not bound yet. Collective."""

    def held_by(self, item: KeepsDivision) -> Any:
        """Return the model as a strategy has returned it. The default is for strategies that divide it in place."""
        del item
        return self.model

    def begin(self) -> None:
        """Divide the model, unless this rank is to join others; called once. Collective."""
        if not is_alone():
            self._bind(None)
        else:
            for item in self._dividing():
                self.model = item.before_joining(self.model, runtime_of_process.current())
        follow_generations(self)

    @override
    def rebind(self, context: RuntimeAPI) -> None:
        """Go on in a new generation, see `Rebindable`. Collective over all ranks."""
        dividing = self._dividing()
        own = [item.division(self.held_by(item), context) for item in dividing] if self._is_divided else None
        runtime = runtime_of_process.current()
        told: list[list[Any] | None] = gather_objects(runtime.world, own)
        known = next((each for each in told if each is not None), None)
        if known is None:  # all have just come, to go on from a checkpoint for example
            self._bind(None)
            return
        for kind in self.memory_kinds:
            runtime.divide(memory=kind)
        if not self._is_divided:
            self._bind(lambda: self._rejoined(context, known))
            return
        for item in dividing:
            item.rebind(self.held_by(item), context)
        if not self.rebind_optimizer(context):  # the last generation ended before it was bound
            self._bind(lambda: self.model)

    @property
    def _plan(self) -> Plan:
        """The plan for the present ranks."""
        return runtime_of_process.current().plan_for(self._strategy)

    def _dividing(self) -> list[KeepsDivision]:
        return self._plan.keeps_division

    def _bind(self, divide: Divide | None) -> None:
        self.model = self.bind(self._plan, divide)
        self._is_divided = True

    def _rejoined(self, context: RuntimeAPI, divisions: Sequence[Any]) -> Any:
        """Return this rank's part of the model: what `Plan.prepare` does, by the choices of other ranks."""
        plan, left, model = self._plan, list(divisions), self._whole
        keeping = {item.name: item for item in plan.keeps_division}
        if plan.chooses_precision is not None:
            model = plan.chooses_precision.prepare(model, plan, context)
        for item in plan.innermost_first:
            if item.name in keeping:
                model = keeping[item.name].rejoin(model, context, left.pop(0))
            else:
                model = item.partition(model, context)
        self.model = model
        self._is_divided = True  # also if the optimizer's binding fails, because a rank is lost meanwhile
        return model


def check_is_known(plan: Plan, of_launcher: Plan) -> None:
    """Raise ConfigurationError unless the launcher knows that the model is divided.

    Args:
        plan: of the model.
        of_launcher: of the command line.
    """
    if not of_launcher.divides_model:
        names = [item.name for item in plan.keeps_division]
        raise ConfigurationError(
            f"this job is elastic, and the script divides the model by {' and '.join(names)}. The launcher, which "
            "decides how many ranks train, has to know: give the strategy on its command line (--strategy)"
        )
