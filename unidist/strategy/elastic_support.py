"""Which strategies survive the loss of a rank in an elastic job. Pure; used by the launcher and on the ranks."""

from __future__ import annotations

from unidist.errors import ConfigurationError
from unidist.mesh import DATA_AXIS
from unidist.strategy.interface import KeepsDivision, Plan, ShardsUpdates, Strategy, SurvivesLoss

_INSTEAD = (
    "Leave it out, or launch without --min-np, --max-np and --host-discovery-script and save checkpoints: a job of "
    "another size loads them."
)


def obstacle(strategy: Strategy, plan: Plan) -> str:
    """Return why this strategy of a plan cannot be used in an elastic job; "" if it can."""
    if isinstance(strategy, SurvivesLoss):
        return strategy.elastic_obstacle(plan)
    if isinstance(strategy, KeepsDivision):
        return ""
    if strategy.axis not in (None, DATA_AXIS) and plan.mesh.axes.get(strategy.axis, 1) > 1:
        return "it divides the model, and what a lost rank holds of that, no other rank has"
    if isinstance(strategy, ShardsUpdates):
        return "it keeps a share of the optimizer's state on each rank, and what a lost rank holds, no other rank has"
    return ""


def check_plan(plan: Plan) -> None:
    """Make sure that an elastic job can have this plan.

    Raises:
        ConfigurationError: a strategy cannot continue when a rank is lost; says why, and what to do.
    """
    for strategy in plan.strategies:
        reason = obstacle(strategy, plan)
        if reason:
            raise ConfigurationError(
                f"this job is elastic, and strategy {strategy.name!r} does not survive the loss of a rank: {reason}. "
                f"{_INSTEAD}"
            )
