"""A Keras model that is divided over ranks, through the generations of an elastic job.

What `distribute` has returned stays the same objects, which scripts, `fit` and traced functions know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unidist import elastic
from unidist.control.elastic.member import is_alone
from unidist.errors import UsageError

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist.strategy.interface import KeepsDivision, Plan
    from unidist.strategy.plan import StrategyLike


class DividedTraining(elastic.DividedTraining):
    """See `unidist.elastic.DividedTraining`.

    Args:
        model: whole, and built.
        optimizer: for its variables, neither built nor bound.
        strategy: see `distribute`.
        bind: see `unidist.elastic.DividedTraining.bind`.
    """

    def __init__(
        self, model: Any, optimizer: Any, strategy: StrategyLike, bind: Callable[[Plan, elastic.Divide | None], Any]
    ) -> None:
        super().__init__(model, strategy)
        self._optimizer, self._bind_model = optimizer, bind
        if is_alone() and getattr(optimizer, "built", False):
            raise UsageError(
                "the optimizer has state of the whole model already, and the model is to be divided over ranks: give a "
                "new one"
            )
        self.begin()

    @override
    def bind(self, plan: Plan, divide: elastic.Divide | None) -> Any:
        return self._bind_model(plan, divide)

    @override
    def rebind_optimizer(self, context: RuntimeAPI) -> bool:
        is_bound = hasattr(self._optimizer, "_unidist")
        if is_bound:
            self._optimizer._unidist.rebind()
        return is_bound

    @override
    def held_by(self, item: KeepsDivision) -> Any:
        """See `unidist.elastic.DividedTraining.held_by`: what runs the steps has returned another object."""
        runs = self._plan.runs_steps
        return self.model if runs is not None and item.name == runs.name else self._whole
