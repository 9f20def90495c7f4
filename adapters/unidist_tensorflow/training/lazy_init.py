"""Keras variables that were made without values."""

from __future__ import annotations

from typing import Any

import keras

from unidist.strategy.interface import Plan
from unidist.strategy.lazy_init import check_initialized_by


def lacks_value(variable: Any) -> bool:
    """Return whether a variable has a shape and an initialiser, but no value yet."""
    return isinstance(variable, keras.Variable) and variable._value is None


def check_deferred(model: Any, plan: Plan) -> None:
    """Check that a strategy gives values to a model's variables that have none.

    Raises:
        ConfigurationError: none does.
    """
    path = next((variable.path for variable in getattr(model, "variables", ()) if lacks_value(variable)), None)
    if path is not None:
        check_initialized_by(plan, path)
