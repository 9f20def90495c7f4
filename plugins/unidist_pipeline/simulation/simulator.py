"""Simulates a schedule: how long it takes and what it holds in memory, from the costs of its actions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from unidist_pipeline.schedules.execution_model import MessageMode, steps_of
from unidist_pipeline.schedules.model import COMPUTE, Action, ActionKind, Schedule, ScheduleError
from unidist_pipeline.schedules.playback import play
from unidist_pipeline.simulation.costs import Costs, StageCosts


@dataclass(frozen=True)
class Simulation:
    """One simulated training step. Times begin with 0.

    Attributes:
        schedule: what was simulated.
        costs: at what costs.
        starts: `starts[rank][i]` is when action i of the rank begins.
        ends: likewise its end.
    """

    schedule: Schedule
    costs: StageCosts
    starts: list[list[float]]
    ends: list[list[float]]

    def computing(self, rank: int) -> Iterator[tuple[Action, float, float]]:
        """Yield the computing actions of a rank, with start and end."""
        for action, start, end in zip(self.schedule.ranks[rank], self.starts[rank], self.ends[rank], strict=True):
            if action.kind in COMPUTE:
                yield action, start, end

    @cached_property
    def makespan(self) -> float:
        """The time when everything is done, exchanges of gradients included."""
        last = 0.0
        for actions, ends in zip(self.schedule.ranks, self.ends, strict=True):
            for action, end in zip(actions, ends, strict=True):
                beside = self.costs.duration(action) if action.kind is ActionKind.REDUCE else 0.0
                last = max(last, end + beside)
        return last

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank computes."""
        return tuple(
            sum(self.costs.duration(action) for action in actions if action.kind in COMPUTE)
            for actions in self.schedule.ranks
        )

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """The time from the first to the last computing action of each rank."""
        found = []
        for rank in range(self.schedule.num_ranks):
            bars = list(self.computing(rank))
            found.append(bars[-1][2] - bars[0][1] if bars else 0.0)
        return tuple(found)

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time, from 0 to the makespan, in which they do not compute: (p-1)/(m+p-1) for 1F1B."""
        total = self.makespan * self.schedule.num_ranks
        return 1 - sum(self.busy) / total if total else 0.0

    @property
    def longest_bubble(self) -> float:
        """The longest idle time of a rank between its first and last action: what Qi et al. 2023 call the bubble.

        Consecutive steps can overlap at their borders if the optimizer does not make all ranks wait; then only this is
        lost.
        """
        return max(span - busy for span, busy in zip(self.spans, self.busy, strict=True))

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """The largest memory for activations on each rank; in numbers of micro-batches if `Costs.activation` is 1."""
        return peak_activations(self.schedule, self.costs)


def peak_activations(schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
    """Return `Simulation.peak_activations` without simulating: it is a matter of the order on each rank alone."""
    kept = costs.costs.kept_for_weight
    change = {
        ActionKind.FORWARD: 1.0,
        ActionKind.BACKWARD: -1.0,
        ActionKind.BACKWARD_INPUT: kept - 1.0,
        ActionKind.BACKWARD_WEIGHT: -kept,
    }
    peaks = []
    for actions in schedule.ranks:
        held = peak = 0.0
        for action in actions:
            if action.kind in change:
                held += change[action.kind] * costs.activation[action.stage]
                if held > peak:
                    peak = held
        peaks.append(peak)
    return tuple(peaks)


def simulate(
    schedule: Schedule, costs: Costs | None = None, *, messages: MessageMode = MessageMode.ASYNCHRONOUS
) -> Simulation:
    """Simulate a schedule; takes time in proportion to its actions.

    Messages do not delay each other, and cost the ranks no time unless they wait for them.

    Args:
        schedule: a valid one.
        costs: default: a forward takes 1, a backward 2, half of it for the weights, messages nothing.
        messages: when ranks wait at a message. By default messages and computing overlap.

    Raises:
        ScheduleError: the schedule deadlocks.
        ConfigurationError: `costs` are for another number of stages.
    """
    stage_costs = (costs or Costs()).for_stages(schedule.num_stages)
    played = play(steps_of(schedule, messages, duration=stage_costs.duration))
    if played.stuck:
        rank, (index, _) = next(iter(played.stuck.items()))
        action = schedule.ranks[rank][index]
        raise ScheduleError(
            f"schedule {schedule.name!r} comes to a deadlock: rank {rank} waits for ever at {action} (action {index}), "
            f"and {len(played.stuck) - 1} other ranks wait too. `validate` says more.",
            rank=rank,
            stage=action.stage,
            microbatch=action.microbatch,
        )
    return Simulation(schedule, stage_costs, played.starts, played.ends)
