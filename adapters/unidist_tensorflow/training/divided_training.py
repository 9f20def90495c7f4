"""A Keras model that is divided over ranks, through the generations of an elastic job.

A rank that stays keeps its part of the model, its variables and its optimizer, and communicates with other ranks. A
rank that joins has the whole model, as the script has built it; it takes its part, as the others hold theirs. Model and
optimizer stay the same objects, which scripts, `fit` and traced functions know.
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
        bind: divides the model and binds the optimizer by the plan, see `bind_model`; it is given what returns this
            rank's part of the model as others hold theirs already, or None.

    Raises:
        ConfigurationError: the strategies that divide the model are the script's own, of which the launcher does not
            know, or one of them cannot go on with a model of Keras.
    """

    def __init__(
        self, model: Any, optimizer: Any, strategy: StrategyLike, bind: Callable[[Plan, Divide | None], object]
    ) -> None:
        runtime = runtime_of_process.current()
        self._model, self._optimizer, self._strategy, self._bind_model = model, optimizer, strategy, bind
        self._is_divided = False
        check_keeps_division(self._plan, runtime.plan)
        if not is_alone():
            self._bind(None)
        elif getattr(optimizer, "built", False):
            raise UsageError(
                "the optimizer has state of the whole model already, and the model is to be divided over ranks: give a "
                "new one"
            )
        follow_generations(self)

    @override
    def rebind(self, context: RuntimeAPI) -> None:
        """Go on in a new generation, see `unidist.elastic.rebinding.Rebindable`. Collective over all ranks."""
        dividing = [item for item in self._plan.innermost_first if isinstance(item, KeepsDivision)]
        own = [item.division(self._model, context) for item in dividing] if self._is_divided else None
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
            item.rebind(self._model, context)
        if hasattr(self._optimizer, "_unidist"):
            self._optimizer._unidist.rebind()
        else:  # the last generation ended before it was bound
            self._bind(lambda: self._model)

    @property
    def _plan(self) -> Plan:
        """The plan for the present ranks."""
        return runtime_of_process.current().plan_for(self._strategy)

    def _bind(self, divide: Divide | None) -> None:
        self._bind_model(self._plan, divide)
        self._is_divided = True

    def _rejoined(self, context: RuntimeAPI, divisions: Sequence[Any]) -> Any:
        """Return this rank's part of the model: what `Plan.prepare` does, by the choices of other ranks."""
        plan, left = self._plan, list(divisions)
        for chooser in plan.all(ChoosesPrecision):
            chooser.prepare(self._model, plan, context)
        for item in plan.innermost_first:
            if isinstance(item, KeepsDivision):
                item.rejoin(self._model, context, left.pop(0))
            else:
                item.partition(self._model, context)
        self._is_divided = True
        return self._model


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
    for item in plan.strategies:
        if isinstance(item, RunsSteps) and item.axis_size != 1:
            raise ConfigurationError(
                f"this job is elastic, and {item.name} divides a Keras model: its stages cannot go on when ranks "
                "change, as those of PyTorch can. Use tensor=N, or launch without --min-np, --max-np and "
                "--host-discovery-script"
            )
