"""Zero-bubble schedules with two stages on each rank, in a V: rank 0 has the first stage and the last.

`zbv` is that of Qi et al. 2023 (arXiv:2401.10241, section 6). `v_half` and `v_min` follow Qi et al. 2024
(arXiv:2405.15362): one micro-batch is planned, the others follow at equal distance. The less time passes between a
stage's forward and its backward, the fewer micro-batches a rank holds. In units of a stage's forward, with F = B = W,
and of the activations of one stage:

| | longest idle time of a rank between its first and last action | activations held |
|---|---|---|
| 1f1b, cut into as many stages | 6(p-1) | 2p |
| zbv | 0 | 2p |
| v-half | 3p-4, or 3p-3 if p is odd | p+3 |
| v-min | 4p-5, or 4p-4 if 3 divides p | 2 floor((p+4)/3) |
"""

from __future__ import annotations

from unidist.errors import ConfigurationError
from unidist_pipeline.schedules.builder import complete
from unidist_pipeline.schedules.model import Action, ActionKind, PipelineSize, Schedule, v_shaped

_PERIOD = 6
"""What a rank does for one micro-batch: forward, backward for input and for weights, of two stages."""


def zbv(size: PipelineSize) -> Schedule:
    """No rank waits between its first and last action if F = B = W, with the memory of 1f1b (ZB-V).

    From 2p-1 micro-batches on; with fewer, those that are not there are left out of the schedule for so many.

    Raises:
        ConfigurationError: another number than two stages on each rank.
    """
    require_two_stages(size, "zbv")
    compute = [
        [action for action in _zbv_rank(rank, size) if (action.microbatch or 0) < size.num_microbatches]
        for rank in range(size.num_ranks)
    ]
    return complete("zbv", size, v_shaped(size), compute)


def v_half(size: PipelineSize) -> Schedule:
    """Half of the idle time of 1f1b, with half of its memory; worth it from 4 ranks on.

    Raises:
        ConfigurationError: another number than two stages on each rank.
    """
    slack = (4, 2, 2) if size.num_ranks % 2 == 0 else (1, 2, 5)
    return _repeated("v-half", size, hops=(1, 2, 1, 2), slack=slack)


def v_min(size: PipelineSize) -> Schedule:
    """Two thirds of the idle time of 1f1b, with a third of its memory; other durations than F = B = W cost it more.

    Raises:
        ConfigurationError: another number than two stages on each rank.
    """
    slack = (1, 1, 1) if size.num_ranks % 3 else (3, 1, 3)
    return _repeated("v-min", size, hops=(1, 1, 1, 1), slack=slack)


def _repeated(
    name: str, size: PipelineSize, *, hops: tuple[int, int, int, int], slack: tuple[int, int, int]
) -> Schedule:
    """Return the schedule that does every `_PERIOD` what it does for the first micro-batch.

    Args:
        name: of the schedule.
        size: for what.
        hops: time from rank to rank on the ways of a micro-batch: forward down the V, forward up, backward down,
            backward up.
        slack: time from the end of one way, on one rank, to the beginning of the next. It decides which of the actions
            would fall on the same time; the values above were found by trying all up to 6, for 2 to 16 ranks.
    """
    require_two_stages(size, name)
    last = size.num_ranks - 1
    compute = []
    for rank in range(size.num_ranks):
        up = hops[0] * last + slack[0]
        down = up + hops[1] * last + slack[1]
        home = down + hops[2] * last + slack[2]
        near, far = rank, size.num_stages - 1 - rank
        times = {
            (ActionKind.FORWARD, near): hops[0] * rank,
            (ActionKind.FORWARD, far): up + hops[1] * (last - rank),
            (ActionKind.BACKWARD_INPUT, far): down + hops[2] * rank,
            (ActionKind.BACKWARD_INPUT, near): home + hops[3] * (last - rank),
        }
        free = set(range(_PERIOD)) - {time % _PERIOD for time in times.values()}
        assert len(free) == 2, f"{name}: on rank {rank} of {size.num_ranks}, two actions fall on the same time"
        for stage in (far, near):  # the weight gradients take what is left, as soon as they can
            after = times[ActionKind.BACKWARD_INPUT, stage] + 1
            times[ActionKind.BACKWARD_WEIGHT, stage] = min(after + (slot - after) % _PERIOD for slot in free)
            free.discard(times[ActionKind.BACKWARD_WEIGHT, stage] % _PERIOD)
        planned = sorted(
            (time + microbatch * _PERIOD, Action(kind, stage, microbatch))
            for (kind, stage), time in times.items()
            for microbatch in range(size.num_microbatches)
        )
        compute.append([action for _, action in planned])
    return complete(name, size, v_shaped(size), compute)


def _zbv_rank(rank: int, size: PipelineSize) -> list[Action]:
    near, far = StageActions(rank), StageActions(size.num_stages - 1 - rank)
    num_microbatches = max(2 * size.num_ranks - 1, size.num_microbatches)
    # Down and up the V: forwards of the near stage until the first micro-batch comes back.
    actions = [near.forward() for _ in range(2 * (size.num_ranks - rank) - 1)]
    for _ in range(rank):
        actions += [far.forward(), near.forward()]
    for _ in range(size.num_ranks - rank):
        actions += [far.forward(), far.backward_input(), far.backward_weight()]
    while far.forwards < near.forwards or near.forwards < num_microbatches:
        if near.forwards < num_microbatches:
            actions.append(near.forward())
        actions += [near.backward_input(), near.backward_weight()]
        actions += [far.forward(), far.backward_input(), far.backward_weight()]
    for _ in range(rank):
        actions += [near.backward_input(), far.backward_input()]
    for _ in range(size.num_ranks - rank):
        actions += [near.backward_input(), near.backward_weight()]
    actions += [far.backward_weight() for _ in range(far.inputs - far.weights)]
    actions += [near.backward_weight() for _ in range(near.inputs - near.weights)]
    return actions


class StageActions:
    """Counts the actions of one stage: each method returns the next one of its kind."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.forwards = self.inputs = self.weights = 0

    def forward(self) -> Action:
        """Return the next forward."""
        self.forwards += 1
        return Action(ActionKind.FORWARD, self.stage, self.forwards - 1)

    def backward(self) -> Action:
        """Return the next full backward."""
        self.inputs += 1
        self.weights += 1
        return Action(ActionKind.BACKWARD, self.stage, self.inputs - 1)

    def backward_input(self) -> Action:
        """Return the next backward for the input."""
        self.inputs += 1
        return Action(ActionKind.BACKWARD_INPUT, self.stage, self.inputs - 1)

    def backward_weight(self) -> Action:
        """Return the next backward for the weights."""
        self.weights += 1
        return Action(ActionKind.BACKWARD_WEIGHT, self.stage, self.weights - 1)


def require_two_stages(size: PipelineSize, name: str) -> None:
    """Raise ConfigurationError for another number of stages on each rank."""
    if size.stages_per_rank != 2:
        raise ConfigurationError(f"{name} has two stages on each rank, not {size.stages_per_rank}.")
