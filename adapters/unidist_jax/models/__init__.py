"""What a strategy makes of the parameters of a model, and of the steps that train it.

May import `compiled`, `operations`, `framework`, `optimizer` and the modules at the root of this package.
"""

from unidist_jax.models.divided_parameters import DividedParameters
from unidist_jax.models.step_runner import LossFunction, StepRunner

__all__ = ["DividedParameters", "LossFunction", "StepRunner"]
