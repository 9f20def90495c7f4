"""Interface between the strategy `context` and a framework, registered as `BindingSpec("context", FRAMEWORK, path)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist_context_parallel.strategy import ContextParallel

__all__ = ["ContextBinding"]


class ContextBinding(ABC):
    """Context parallelism for one framework. Made without arguments."""

    @abstractmethod
    def partition(self, strategy: ContextParallel, model: Any, context: RuntimeAPI) -> Any:
        """Let the model divide what it is called with, and return it; see `Strategy.partition`. Collective.

        Raises:
            ConfigurationError: the model cannot be followed; says why and what to do.
        """
