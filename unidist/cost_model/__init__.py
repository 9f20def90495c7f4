"""The terms in which strategies say what they cost: memory of a rank, arithmetic and messages of a step, machines.

Plain arithmetic; the planner (`unidist plan`, `unidist estimate`) is a plugin that puts the answers together.
Imports `strategy` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.cost_model.cluster import Cluster, Group
    from unidist.cost_model.collectives import Link, cost, fastest
    from unidist.cost_model.efficiency import Efficiency
    from unidist.cost_model.exchange_cost import allreduced, served, sharded
    from unidist.cost_model.figures import (
        ActivationBytes,
        ActivationModel,
        MeasuredActivations,
        ModelFigures,
        ParameterFigures,
        Precision,
        Workload,
        unit_of,
    )
    from unidist.cost_model.memory import (
        CATEGORIES,
        Category,
        HeldActivations,
        Holding,
        Place,
        RankMemory,
        WorkingMemory,
    )
    from unidist.cost_model.memory_interface import EstimatesMemory, SizesModels
    from unidist.cost_model.sequence_cost import (
        divided_experts,
        divided_sequence,
        expert_memory,
        sequence_memory,
    )
    from unidist.cost_model.step import Exchange, Moment, Operation, Order, RankStep
    from unidist.cost_model.step_interface import (
        CountsOperations,
        PredictsStepTime,
        RemainingRanks,
        SearchProblem,
        divisors,
    )
    from unidist.cost_model.work import CountedBlock, CountedPass, Layer, ModelWork, PieceWork

__all__ = [
    "ActivationBytes", "ActivationModel", "CATEGORIES", "Category", "Cluster", "CountedBlock", "CountedPass",
    "CountsOperations", "Efficiency", "EstimatesMemory", "Exchange", "Group", "HeldActivations", "Holding", "Layer",
    "Link",
    "MeasuredActivations", "ModelFigures", "ModelWork", "Moment", "Operation", "Order", "ParameterFigures", "PieceWork",
    "Place", "Precision", "PredictsStepTime", "RankMemory", "RankStep", "RemainingRanks", "SearchProblem",
    "SizesModels", "WorkingMemory", "Workload", "allreduced", "cost", "divided_experts", "divided_sequence", "divisors",
    "expert_memory", "fastest", "sequence_memory", "served", "sharded", "unit_of",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "cluster": "Cluster Group",
        "collectives": "Link cost fastest",
        "efficiency": "Efficiency",
        "exchange_cost": "allreduced served sharded",
        "figures": (
            "ActivationBytes ActivationModel MeasuredActivations ModelFigures ParameterFigures Precision Workload "
            "unit_of"
        ),
        "memory": "CATEGORIES Category HeldActivations Holding Place RankMemory WorkingMemory",
        "memory_interface": "EstimatesMemory SizesModels",
        "sequence_cost": "divided_experts divided_sequence expert_memory sequence_memory",
        "step": "Exchange Moment Operation Order RankStep",
        "step_interface": "CountsOperations PredictsStepTime RemainingRanks SearchProblem divisors",
        "work": "CountedBlock CountedPass Layer ModelWork PieceWork",
    },
)
