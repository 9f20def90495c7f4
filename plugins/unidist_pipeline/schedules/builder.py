"""Completes a schedule of computing actions: inserts the messages and the exchange of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unidist_pipeline.schedules.facts import made_by, needed_by
from unidist_pipeline.schedules.model import Action, ActionKind, PipelineSize, Schedule, ScheduleError
from unidist_pipeline.schedules.playback import PlaybackStep, play

_USUAL_DURATION = {
    ActionKind.FORWARD: 1.0,
    ActionKind.BACKWARD: 2.0,
    ActionKind.BACKWARD_INPUT: 1.0,
    ActionKind.BACKWARD_WEIGHT: 1.0,
}
_WEIGHTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


def complete(name: str, size: PipelineSize, placement: Sequence[int], compute: Sequence[Sequence[Action]]) -> Schedule:
    """Return the schedule in which each rank computes as given.

    A message is sent right after the action that makes it, and received where that rank would be by then if a backward
    took twice as long as a forward. So all sends and receives have one common order in time, which the lists of all
    ranks follow: no executor can deadlock, and messages between two ranks arrive in the expected order. The gradients
    of a stage are exchanged (`REDUCE_GRAD`) after its last weight gradient.

    Args:
        name: of the schedule.
        size: for what it was made; without messages if it says so.
        placement: the rank of each stage.
        compute: for each rank, its forwards and backwards in order.

    Raises:
        ScheduleError: the lists cannot be run in their order, or refer to stages or micro-batches that do not exist.
    """
    _check_names(name, size, placement, compute)
    if not size.messages:
        return Schedule(name, size.num_microbatches, tuple(placement), tuple(map(tuple, compute)))
    inbound = _messages(name, placement, compute)
    ranks = []
    for actions, messages in zip(compute, inbound, strict=True):
        last = {action.stage: index for index, action in enumerate(actions) if action.kind in _WEIGHTS}
        merged: list[Action] = []
        for index, action in enumerate(actions):
            merged += messages.get(index, ())
            merged.append(action)
            if last.get(action.stage) == index:
                # Another stage waits for this action's message, so that goes first.
                following = messages.setdefault(index + 1, [])
                own = [place for place, message in enumerate(following, start=1) if _carries(message, action)]
                following.insert(own[0] if own else 0, Action(ActionKind.REDUCE, action.stage))
        merged += messages.get(len(actions), ())
        ranks.append(tuple(merged))
    return Schedule(name, size.num_microbatches, tuple(placement), tuple(ranks))


def with_gathers(schedule: Schedule) -> Schedule:
    """Return the schedule with one `UNSHARD` of every stage, before its first forward.

    For strategies that leave each rank of the data axis a shard of the updated parameters: the later stages of a
    pipeline have time to gather them while they wait for the first micro-batch.
    """
    ranks = []
    for actions in schedule.ranks:
        gathered: set[int] = set()
        merged: list[Action] = []
        for action in actions:
            if action.kind is ActionKind.FORWARD and action.stage not in gathered:
                gathered.add(action.stage)
                merged.append(Action(ActionKind.GATHER, action.stage))
            merged.append(action)
        ranks.append(tuple(merged))
    return Schedule(schedule.name, schedule.num_microbatches, schedule.placement, tuple(ranks))


def _messages(
    name: str, placement: Sequence[int], compute: Sequence[Sequence[Action]]
) -> list[dict[int, list[Action]]]:
    """Return for each rank the messages before its computing action number i, in order."""
    steps = [
        [
            PlaybackStep(needed_by(action, placement, by_message=False), made_by(action), _USUAL_DURATION[action.kind])
            for action in actions
        ]
        for actions in compute
    ]
    played = play(steps)
    if played.stuck:
        rank, (index, fact) = next(iter(played.stuck.items()))
        action = compute[rank][index]
        word, stage, microbatch = fact
        raise ScheduleError(
            f"schedule {name!r} cannot be run in its order: rank {rank} waits at {action} (action {index}) for the "
            f"{word} of stage {stage}, micro-batch {microbatch}, which is never made, or only after ranks that wait "
            f"themselves: {_ranks(played.stuck)}.",
            rank=rank,
            stage=action.stage,
            microbatch=action.microbatch,
        )
    found: list[tuple[float, int, int, int, Action, Action]] = []
    for rank, actions in enumerate(compute):
        for index, action in enumerate(actions):
            pair = _pair(action, placement)
            if pair is not None:
                found.append((played.ends[rank][index], rank, index, pair[0].peer or 0, *pair))
    found.sort()
    before: list[dict[int, list[Action]]] = [{} for _ in compute]
    position = [0] * len(compute)
    for time, rank, index, peer, send, receive in found:
        before[rank].setdefault(index + 1, []).append(send)
        starts = played.starts[peer]
        while position[peer] < len(starts) and starts[position[peer]] < time:
            position[peer] += 1
        before[peer].setdefault(position[peer], []).append(receive)
    return before


def _pair(action: Action, placement: Sequence[int]) -> tuple[Action, Action] | None:
    """Return send and receive of what `action` makes, if another rank needs it."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.FORWARD and stage + 1 < len(placement):
        other, send, receive = stage + 1, ActionKind.SEND_ACTIVATION, ActionKind.RECEIVE_ACTIVATION
    elif action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT) and stage > 0:
        other, send, receive = stage - 1, ActionKind.SEND_GRADIENT, ActionKind.RECEIVE_GRADIENT
    else:
        return None
    here, there = placement[stage], placement[other]
    if here == there:
        return None
    return Action(send, stage, microbatch, there), Action(receive, other, microbatch, here)


def _carries(message: Action, action: Action) -> bool:
    same = (message.stage, message.microbatch) == (action.stage, action.microbatch)
    return same and message.kind is ActionKind.SEND_GRADIENT and action.kind is ActionKind.BACKWARD


def _check_names(name: str, size: PipelineSize, placement: Sequence[int], compute: Sequence[Sequence[Action]]) -> None:
    if len(compute) != size.num_ranks or any(not 0 <= rank < size.num_ranks for rank in placement):
        raise ScheduleError(
            f"schedule {name!r} has lists for {len(compute)} ranks and places stages on ranks "
            f"{_ranks(set(placement))}; it was made for {size.num_ranks} ranks."
        )
    for rank, actions in enumerate(compute):
        for index, action in enumerate(actions):
            if action.kind not in _USUAL_DURATION:
                raise ScheduleError(
                    f"schedule {name!r}, rank {rank}, action {index}: {action} does not compute; give forwards and "
                    "backwards only, messages and exchanges are put in between.",
                    rank=rank,
                    stage=action.stage,
                )
            valid = 0 <= action.stage < len(placement) and placement[action.stage] == rank
            if not valid or action.microbatch is None or not 0 <= action.microbatch < size.num_microbatches:
                held = _ranks(stage for stage, holder in enumerate(placement) if holder == rank)
                raise ScheduleError(
                    f"schedule {name!r}, rank {rank}, action {index}: {action} is not for this rank, which has stages "
                    f"{held} and micro-batches 0 to {size.num_microbatches - 1}.",
                    rank=rank,
                    stage=action.stage,
                    microbatch=action.microbatch,
                )


def _ranks(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    text = ", ".join(map(str, ordered[:8]))
    return f"{text}, ... ({len(ordered)} in all)" if len(ordered) > 8 else text
