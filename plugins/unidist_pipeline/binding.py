"""Interface of the strategy `pipeline` to a framework, registered as `BindingSpec("pipeline", FRAMEWORK, path)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unidist.optim.interface import MakesStepRunner
    from unidist.runtime_api import RuntimeAPI
    from unidist_pipeline.strategy import Pipeline


class PipelineBinding(ABC):
    """Pipelines for one framework. Made without arguments."""

    @abstractmethod
    def partition(self, strategy: Pipeline, model: Any, context: RuntimeAPI) -> Any:
        """Return the model without the stages of other ranks; see `Strategy.partition`.

        Collective over all ranks if the model is measured.

        Raises:
            ConfigurationError: the model cannot be cut into so many stages, or not there; says why and what to do.
        """

    @abstractmethod
    def step_runner(self, strategy: Pipeline) -> MakesStepRunner:
        """Return a factory of runners for a divided model; see `RunsSteps.step_runner`."""


class KeepsStages(ABC):
    """Capability of a `PipelineBinding`: a divided model goes on when the ranks of an elastic job change.

    Only the runner of its steps communicates; what belongs to one generation is made again in the next.
    """

    @abstractmethod
    def division(self, model: Any) -> Any:
        """See `KeepsDivision.division`."""

    def before_joining(self, model: Any) -> Any:
        """See `KeepsDivision.before_joining`."""
        return model

    @abstractmethod
    def rejoin(self, strategy: Pipeline, model: Any, context: RuntimeAPI, division: Any) -> Any:
        """See `KeepsDivision.rejoin`."""
