"""One optimizer's updates, free of any framework: passes, scaling, and post-processing of reduced gradients.

`update` is what adapters talk to; `interface` is what they implement. Imports `gradients` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist._lazy import lazy_names

if TYPE_CHECKING:
    from unidist.optim.accumulation import Accumulation, Window
    from unidist.optim.interface import (
        BindsOptimizers,
        FollowsUpdates,
        InnerStep,
        MakesInnerStep,
        MakesStepRunner,
        ShardsInnerSteps,
        StepRunner,
    )
    from unidist.optim.loss_scaling import LossScaler
    from unidist.optim.rules import GradientRule, GradientRules, NormRule, WholeGradient
    from unidist.optim.update import MakesExchange, Update, UpdateParts

__all__ = [
    "Accumulation",
    "BindsOptimizers",
    "FollowsUpdates",
    "GradientRule",
    "GradientRules",
    "InnerStep",
    "LossScaler",
    "MakesExchange",
    "MakesInnerStep",
    "MakesStepRunner",
    "NormRule",
    "ShardsInnerSteps",
    "StepRunner",
    "Update",
    "UpdateParts",
    "WholeGradient",
    "Window",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Accumulation": "accumulation",
        "BindsOptimizers": "interface",
        "FollowsUpdates": "interface",
        "GradientRule": "rules",
        "GradientRules": "rules",
        "InnerStep": "interface",
        "LossScaler": "loss_scaling",
        "MakesExchange": "update",
        "MakesInnerStep": "interface",
        "MakesStepRunner": "interface",
        "NormRule": "rules",
        "ShardsInnerSteps": "interface",
        "StepRunner": "interface",
        "Update": "update",
        "UpdateParts": "update",
        "WholeGradient": "rules",
        "Window": "accumulation",
    },
)
