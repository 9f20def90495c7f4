"""The exchanges of the data axis: what of gradients and parameters moves for an update, with and without ZeRO."""

from __future__ import annotations

from unidist.cost_model.step import Exchange, RankStep
from unidist.mesh import DATA_AXIS


def allreduced(step: RankStep, *, beside: bool = True) -> RankStep:
    """Return the step with one all-reduce of the gradients: 2 (p-1)/p of them are moved.

    Args:
        step: without it.
        beside: buckets are exchanged while the backward pass of the last piece runs.
    """
    return step.exchanging(Exchange("gradients", "allreduce", DATA_AXIS, "gradients", "update", beside=beside))


def sharded(step: RankStep, *, stage: int, shared: bool = False) -> RankStep:
    """Return the step with the exchanges of a stage of ZeRO (Rajbhandari et al. 2020, section 7).

    Stages 1 and 2 reduce-scatter gradients, and gather the updated parameters: as much as an all-reduce. Stage 3
    gathers parameters in every forward and every backward pass instead: half as much again, more often where there are
    several pieces. Where ranks share the memory of the parameters nothing is gathered.
    """
    step = step.exchanging(
        Exchange("gradients", "reducescatter", DATA_AXIS, "gradients", "update", beside=True),
    )
    if shared:
        return step
    if stage < 3:
        return step.exchanging(Exchange("parameters", "allgather", DATA_AXIS, "parameters", "update"))
    return step.exchanging(
        Exchange("parameters", "allgather", DATA_AXIS, "parameters", "forward", beside=True),
        Exchange("parameters", "allgather", DATA_AXIS, "parameters", "backward", beside=True),
    )
