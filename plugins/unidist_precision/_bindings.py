"""What prepares a model of a framework; found by the framework's name, imported when used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol, cast

from unidist.errors import ConfigurationError, UsageError

if TYPE_CHECKING:
    from unidist.buffer import DType
    from unidist.framework import Framework
    from unidist.optim.loss_scaling import LossScaler
    from unidist.optim.precision import Precision
    from unidist.runtime.context import Context

_MODULES = {"torch": "unidist_precision._torch", "tensorflow": "unidist_precision._tensorflow"}


class Binding(Protocol):
    """A module that knows one framework."""

    def prepare(self, model: Any, precision: Precision) -> Any:
        """Return the model with its parameters and layers in the types of `precision`.

        Raises:
            UsageError: nothing in the model is float32.
        """

    def attach(self, model: Any, compute: DType, scaler: LossScaler | None) -> None:
        """Let the model compute in `compute`, and its loss be scaled."""


def binding_for(framework: Framework) -> Binding:
    """Return the module for a framework.

    Raises:
        ConfigurationError: there is none.
    """
    if framework.name not in _MODULES:
        raise ConfigurationError(f"precision knows models of {' and '.join(_MODULES)}, not of {framework.name}")
    return cast(Binding, importlib.import_module(_MODULES[framework.name]))


def framework_of(model: Any, context: Context) -> Framework:
    """Return the framework that a model is of."""
    for spec in context.plugins.frameworks:
        framework = spec.load()
        if framework.is_model(model):
            return framework
    raise UsageError(f"{type(model).__qualname__} is no model of any framework that unidist knows")
