"""One optimizer's updates, free of any framework: passes, scaling, and post-processing of reduced gradients.

Adapters use `update` and implement `interface`. Imports `gradients`, `negotiation`, `waits` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.optim.accumulation import Accumulation, Window
    from unidist.optim.actors import Actors, ActsOnParameters, TrainedState, check_keeps_parameters
    from unidist.optim.interface import (
        BindsOptimizers,
        BringsInnerStep,
        ChecksBeforeSave,
        FollowsUpdates,
        InnerStep,
        KeepsTensors,
        KnowsHolders,
        MakesInnerStep,
        MakesStepRunner,
        OutlivesGenerations,
        StepRunner,
    )
    from unidist.optim.loss_scaling import LossScaler
    from unidist.optim.loss_weights import BoundUpdates, LossWeights
    from unidist.optim.rounding_key import HASH_FACTORS, RoundingKey
    from unidist.optim.rules import GradientRule, GradientRules, NormRule, ValueRule, WholeGradient
    from unidist.optim.trial import LATE_STEP, late_steps, step_counters, trial_shape, trial_shapes, uneven_middle
    from unidist.optim.update import MakesExchange, Update, UpdateParts, update_of

__all__ = [
    "Accumulation", "Actors", "ActsOnParameters", "BindsOptimizers", "BoundUpdates", "BringsInnerStep",
    "ChecksBeforeSave", "FollowsUpdates", "GradientRule", "GradientRules", "HASH_FACTORS", "InnerStep",
    "KeepsTensors", "KnowsHolders", "LATE_STEP", "LossScaler", "LossWeights", "MakesExchange", "MakesInnerStep",
    "MakesStepRunner", "NormRule", "OutlivesGenerations", "RoundingKey", "StepRunner", "TrainedState", "Update",
    "UpdateParts", "ValueRule", "WholeGradient", "Window", "check_keeps_parameters", "late_steps", "step_counters",
    "trial_shape", "trial_shapes", "uneven_middle", "update_of",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "accumulation": "Accumulation Window",
        "actors": "Actors ActsOnParameters TrainedState check_keeps_parameters",
        "interface": (
            "BindsOptimizers ChecksBeforeSave FollowsUpdates InnerStep KeepsTensors KnowsHolders MakesInnerStep "
            "MakesStepRunner BringsInnerStep OutlivesGenerations StepRunner"
        ),
        "loss_scaling": "LossScaler",
        "loss_weights": "BoundUpdates LossWeights",
        "rounding_key": "HASH_FACTORS RoundingKey",
        "rules": "GradientRule GradientRules NormRule ValueRule WholeGradient",
        "trial": "LATE_STEP late_steps step_counters trial_shape trial_shapes uneven_middle",
        "update": "MakesExchange Update UpdateParts update_of",
    },
)
