"""Interface between the strategy `tensor` and a framework, registered as `BindingSpec("tensor", FRAMEWORK, path)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist_tensor_parallel.strategy import TensorParallel


class TensorBinding(ABC):
    """Tensor parallelism for one framework. Made without arguments."""

    @abstractmethod
    def partition(self, strategy: TensorParallel, model: Any, context: RuntimeAPI) -> Any:
        """Cut the layers of a model in place, and return it; see `Strategy.partition`. Collective over the axis.

        Raises:
            ConfigurationError: nothing can be cut, a pattern matches nothing, or a layer cannot be cut as asked.
        """


class KeepsCuts(ABC):
    """Capability of a `TensorBinding`: a cut model goes on when the ranks of an elastic job change."""

    @abstractmethod
    def division(self, model: Any) -> Any:
        """See `KeepsDivision.division`."""

    @abstractmethod
    def rejoin(self, model: Any, context: RuntimeAPI, division: Any) -> Any:
        """See `KeepsDivision.rejoin`."""

    @abstractmethod
    def rebind(self, model: Any, context: RuntimeAPI) -> None:
        """See `KeepsDivision.rebind`."""
