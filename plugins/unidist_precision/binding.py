"""Interface of the strategy `precision` to a framework, registered as `BindingSpec("precision", FRAMEWORK, path)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from unidist.buffer import DType
    from unidist.gradients.precision import Precision
    from unidist.optim.loss_scaling import LossScaler


class PrecisionBinding(ABC):
    """Mixed precision for one framework. Made without arguments.

    Attributes:
        rounds_updates: optimizers of this framework can keep their state in 16 bits, see `Precision.rounding`.
    """

    rounds_updates: ClassVar[bool] = False

    @abstractmethod
    def prepare(self, model: Any, precision: Precision) -> Any:
        """Return the model with its parameters and layers in the types of `precision`.

        Raises:
            UsageError: nothing in the model is float32.
        """

    @abstractmethod
    def attach(self, model: Any, compute: DType, scaler: LossScaler | None) -> Callable[[], str]:
        """Let the model compute in `compute`, and scale its loss.

        Returns:
            Called after the first update: says what of the model has not computed in `compute`, and what to do; empty
            if all did.
        """
