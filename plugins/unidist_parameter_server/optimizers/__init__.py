"""Optimizers on flat numpy arrays, which stores apply to pushed gradients. Element by element; no framework.

`native` has them in C, where that was built. Imports `native` and numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_parameter_server.optimizers.adam import Adam
    from unidist_parameter_server.optimizers.descent import Adagrad, Momentum, Velocity
    from unidist_parameter_server.optimizers.interface import AddDifference, FlatStep, Rule
    from unidist_parameter_server.optimizers.native import apply_native, native_rules

__all__ = [
    "Adagrad", "Adam", "AddDifference", "FlatStep", "Momentum", "Rule", "Velocity", "apply_native", "native_rules",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "adam": "Adam",
        "descent": "Adagrad Momentum Velocity",
        "interface": "AddDifference FlatStep Rule",
        "native": "apply_native native_rules",
    },
)
