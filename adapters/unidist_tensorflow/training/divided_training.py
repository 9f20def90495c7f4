"""A Keras model that is divided over ranks, through the generations of an elastic job.

A rank that stays keeps its part of the model, its variables and its optimizer, and communicates with other ranks. A
rank that joins has the whole model, as the script has built it; it takes its part, as the others hold theirs. What
`distribute` has returned stays the same objects, which scripts, `fit` and traced functions know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unidist.control.elastic.member import is_alone
from unidist.elastic.rebinding import Rebindable, follow_generations
from unidist.errors import ConfigurationError, UsageError
from unidist.negotiation.objects import gather_objects
from unidist.runtime import context as runtime_of_process
from unidist.strategy.interface import ChoosesPrecision, KeepsDivision, RunsSteps

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist.strategy.interface import Plan
    from unidist.strategy.plan import StrategyLike

Divide = Callable[[], Any]


class DividedTraining(Rebindable):
    """Divides a model and binds its optimizer: now, or when this rank joins the others.

    Args:
        model: whole, and built.
        optimizer: for its variables, neither built nor bound.
        strategy: see `distribute`.
        bind: divides the model and binds the optimizer by the plan, see `bind_model`, and returns this rank's part of
            the model; it is given what returns that part as others hold theirs already, or None.

    Attributes:
        model: this rank's part; as long as the rank is alone, what will be its part.

    Raises:
        ConfigurationError: the strategies that divide the model are the script's own, of which the launcher does not
            know, or one of them cannot go on with a model of Keras.
    """

    def __init__(
        self, model: Any, optimizer: Any, strategy: StrategyLike, bind: Callable[[Plan, Divide | None], Any]
    ) -> None:
        runtime = runtime_of_process.current()
        self.model = model
        self._whole, self._optimizer, self._strategy, self._bind_model = model, optimizer, strategy, bind
        self._is_divided = False
        check_keeps_division(self._plan, runtime.plan)
        if not is_alone():
            self._bind(None)
        elif getattr(optimizer, "built", False):
            raise UsageError(
                "the optimizer has state of the whole model already, and the model is to be divided over ranks: give a "
                "new one"
            )
        else:
            for item in self._dividing():
                self.model = item.before_joining(self.model, runtime)
        follow_generations(self)

    @override
    def rebind(self, context: RuntimeAPI) -> None:
        """Go on in a new generation, see `unidist.elastic.rebinding.Rebindable`. Collective over all ranks."""
        dividing = self._dividing()
        own = [item.division(self.model, context) for item in dividing] if self._is_divided else None
        runtime = runtime_of_process.current()
        told: list[list[Any] | None] = gather_objects(runtime.world, own)
        known = next((each for each in told if each is not None), None)
        if known is None:  # all have just come, to go on from a checkpoint for example
            self._bind(None)
            return
        runtime.divide()
        if not self._is_divided:
            self._bind(lambda: self._rejoined(context, known))
            return
        for item in dividing:
            item.rebind(self.model, context)
        if hasattr(self._optimizer, "_unidist"):
            self._optimizer._unidist.rebind()
        else:  # the last generation ended before it was bound
            self._bind(lambda: self.model)

    @property
    def _plan(self) -> Plan:
        """The plan for the present ranks."""
        return runtime_of_process.current().plan_for(self._strategy)

    def _dividing(self) -> list[KeepsDivision]:
        return [item for item in self._plan.innermost_first if isinstance(item, KeepsDivision)]

    def _bind(self, divide: Divide | None) -> None:
        self.model = self._bind_model(self._plan, divide)
        self._is_divided = True

    def _rejoined(self, context: RuntimeAPI, divisions: Sequence[Any]) -> Any:
        """Return this rank's part of the model: what `Plan.prepare` does, by the choices of other ranks."""
        plan, left, model = self._plan, list(divisions), self._whole
        for chooser in plan.all(ChoosesPrecision):
            model = chooser.prepare(model, plan, context)
        for item in plan.innermost_first:
            if isinstance(item, KeepsDivision):
                model = item.rejoin(model, context, left.pop(0))
            else:
                model = item.partition(model, context)
        self.model = model
        self._is_divided = True
        return model


def check_keeps_division(plan: Plan, of_launcher: Plan) -> None:
    """Raise ConfigurationError unless a Keras model that is divided by this plan can go on when ranks change.

    Args:
        plan: of the model.
        of_launcher: of the command line.
    """
    if not of_launcher.divides_model:
        names = [item.name for item in plan.strategies if isinstance(item, KeepsDivision)]
        raise ConfigurationError(
            f"this job is elastic, and the script divides the model by {' and '.join(names)}. The launcher, which "
            "decides how many ranks train, has to know: give the strategy on its command line (--strategy)"
        )
    dividing = [item for item in plan.strategies if isinstance(item, KeepsDivision) and item.axis_size != 1]
    stages = next((item.name for item in dividing if isinstance(item, RunsSteps)), None)
    if stages is not None and len(dividing) > 1:
        others = " and ".join(item.name for item in dividing if item.name != stages)
        raise ConfigurationError(
            f"this job is elastic, and {stages} and {others} divide a Keras model: its stages cannot go on when "
            f"ranks change, as those of PyTorch can, if they are divided themselves. Use {stages} or {others}, "
            "or launch without --min-np, --max-np and --host-discovery-script"
        )
