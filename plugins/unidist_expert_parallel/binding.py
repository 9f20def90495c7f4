"""Interface between the strategy `expert` and a framework, registered as `BindingSpec("expert", FRAMEWORK, path)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist_expert_parallel.strategy import ExpertParallel


class ExpertBinding(ABC):
    """Expert parallelism for one framework. Made without arguments."""

    @abstractmethod
    def partition(self, strategy: ExpertParallel, model: Any, context: RuntimeAPI) -> Any:
        """Leave this rank its experts of every layer, in place, and return the model; see `Strategy.partition`.

        Collective over all ranks.

        Raises:
            ConfigurationError: the model has no experts that can be found, or the ranks do not divide them.
        """

    @abstractmethod
    def output_obstacle(self, model: Any) -> str:
        """See `Strategy.output_obstacle`."""
