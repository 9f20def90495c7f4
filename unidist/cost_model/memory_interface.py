"""The interfaces of memory estimates: strategies report what they change, frameworks describe a model's parameters.

Both are capabilities: a strategy or a framework that has one derives from the class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unidist.cost_model.figures import MeasuredActivations, ParameterFigures, Workload
    from unidist.cost_model.memory import RankMemory
    from unidist.strategy.interface import Plan


class EstimatesMemory(ABC):
    """Capability of a `Strategy`: it changes what a rank keeps in memory. Others are assumed to change nothing.

    A trivial implementation returns `memory` as it is. ZeRO's is one line, see `unidist_zero.memory_figures`.
    """

    @abstractmethod
    def estimate(self, memory: RankMemory, workload: Workload, plan: Plan) -> RankMemory:
        """Return what a rank holds with this strategy. Pure; called for each strategy of the plan, in its order.

        Where ranks differ (a pipeline's stages) it is the rank that holds most.

        Args:
            memory: what a rank holds with the strategies before this one. Multiply shares and set widths
                (`memory.split`, `memory.widths`), never set shares: then the order of strategies does not matter.
            workload: model, batch and optimizer.
            plan: all strategies, and the mesh: `plan.mesh.size("data")` is the number of ranks to share with.
        """

    @classmethod
    def alternatives(cls) -> Sequence[str]:
        """Return the items of a strategy line that `unidist estimate` shall compare: `("zero=1", "zero=2", "zero=3")`.

        Every combination with other strategies' is tried, so give few. The default has none.
        """
        return ()


class SizesModels(ABC):
    """Capability of a `Framework`: describes a model's parameters, if possible without allocating them."""

    @abstractmethod
    def without_memory(self) -> AbstractContextManager[Any] | None:
        """Return a context in which models are built without memory for their parameters, None if there is none."""

    @abstractmethod
    def parameter_figures(self, model: Any) -> Mapping[str, ParameterFigures]:
        """Return the size of every parameter by its path, frozen ones included, shared ones once.

        Raises:
            UsageError: the model is not built yet; says how to build it.
        """

    @abstractmethod
    def activations(self, model: Any, inputs: Sequence[Any]) -> MeasuredActivations | None:
        """Return what a forward pass keeps for its backward pass, None if the framework cannot tell.

        Args:
            model: made in the context of `without_memory`, or not.
            inputs: its arguments, made in the same way.
        """
