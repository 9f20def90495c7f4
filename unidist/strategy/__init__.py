"""Strategies: the interface and the capabilities beyond it, the plan of a run, and bindings to frameworks.

All of it runs in the launcher too. Imports `optim`, `gradients`, `control.elastic` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.strategy.bindings import BindingSpec, find_binding
    from unidist.strategy.composition import DescribedStrategy, Option, Pair, described, pairs
    from unidist.strategy.elastic_support import check_plan, obstacle
    from unidist.strategy.interface import (
        ActsOnGradients,
        ChoosesPrecision,
        GradientOwner,
        KeepsDivision,
        NamesPlugins,
        OutlivesRanks,
        OwnsParameters,
        Plan,
        RunsSideProcesses,
        RunsSteps,
        ShardsUpdates,
        Strategy,
        StrategySpec,
        SurvivesLoss,
        UpdateGate,
    )
    from unidist.strategy.lazy_init import InitializesModels, check_initialized_by
    from unidist.strategy.plan import StrategyLike, build, make_plan

__all__ = [
    "ActsOnGradients", "BindingSpec", "ChoosesPrecision", "DescribedStrategy", "GradientOwner", "InitializesModels",
    "KeepsDivision", "NamesPlugins", "Option", "OutlivesRanks", "OwnsParameters", "Pair", "Plan", "RunsSideProcesses",
    "RunsSteps", "ShardsUpdates", "Strategy", "StrategyLike", "StrategySpec", "SurvivesLoss", "UpdateGate", "build",
    "check_initialized_by", "check_plan", "described", "find_binding", "make_plan", "obstacle", "pairs",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "bindings": "BindingSpec find_binding",
        "composition": "DescribedStrategy Option Pair described pairs",
        "elastic_support": "check_plan obstacle",
        "interface": (
            "ActsOnGradients ChoosesPrecision GradientOwner KeepsDivision NamesPlugins OutlivesRanks OwnsParameters "
            "Plan RunsSideProcesses RunsSteps ShardsUpdates Strategy StrategySpec SurvivesLoss UpdateGate"
        ),
        "lazy_init": "InitializesModels check_initialized_by",
        "plan": "StrategyLike build make_plan",
    },
)
