"""The parameters, loss and training step of a model as a strategy has changed them.

May import `compiled`, `operations`, `framework`, `optimizer` and the modules at the root of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_jax.models.divided_parameters import DividedParameters
    from unidist_jax.models.equal_inputs import EqualInputs
    from unidist_jax.models.programs import (
        CALLS,
        at_line_of,
        bind_equation,
        called,
        evaluate,
        inlined,
        is_literal,
        line_of,
        scan_counts,
        value_of,
        variables,
    )
    from unidist_jax.models.step_runner import LossFunction, StepRunner

__all__ = [
    "CALLS", "DividedParameters", "EqualInputs", "LossFunction", "StepRunner", "at_line_of", "bind_equation", "called",
    "evaluate", "inlined", "is_literal", "line_of", "scan_counts", "value_of", "variables",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "divided_parameters": "DividedParameters",
        "equal_inputs": "EqualInputs",
        "programs": (
            "CALLS at_line_of bind_equation called evaluate inlined is_literal line_of scan_counts value_of variables"
        ),
        "step_runner": "LossFunction StepRunner",
    },
)
