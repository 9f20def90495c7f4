"""Checks that a schedule computes one training step, and that no executor can deadlock.

- Each stage computes each micro-batch once forward and once backward, in this order; the gradient of the weights is
  computed exactly once, in a full backward or after the backward for the input.
- Whatever a stage needs from another rank is received before, and sent once; between two ranks, messages are received
  in the order in which they are sent.
- Gradients of a stage are exchanged once, after its last weight gradient; parameters are gathered, if at all, once,
  before its first forward.
- All lists can be run to their end, even if a send waits for its receive.
"""

from __future__ import annotations

from collections import defaultdict

from unidist_pipeline.schedules.execution_model import MessageMode, steps_of
from unidist_pipeline.schedules.facts import Fact, delivered_by
from unidist_pipeline.schedules.model import RECEIVES, SENDS, WHOLE_STAGE, Action, ActionKind, Schedule, ScheduleError
from unidist_pipeline.schedules.playback import play

F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741
_Positions = dict[tuple[ActionKind, int, int | None], int]


def validate(schedule: Schedule) -> None:
    """Return if the schedule keeps the rules of the module's text; takes time in proportion to its actions.

    Raises:
        ScheduleError: the first rule that it breaks, with rank, stage and micro-batch.
    """
    _check_placement(schedule)
    for rank in range(schedule.num_ranks):
        _check_rank(schedule, rank)
    _check_messages(schedule)
    _check_progress(schedule)


def _check_placement(schedule: Schedule) -> None:
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < schedule.num_ranks:
            raise ScheduleError(
                f"schedule {schedule.name!r} places stage {stage} on rank {rank}, but has lists for ranks 0 to "
                f"{schedule.num_ranks - 1}.",
                rank=rank,
                stage=stage,
            )
    for rank, stages in enumerate(schedule.stages):
        if not stages:
            raise ScheduleError(
                f"schedule {schedule.name!r} has a list for rank {rank}, but no stage there.", rank=rank
            )


def _check_rank(schedule: Schedule, rank: int) -> None:
    at: _Positions = {}
    for index, action in enumerate(schedule.ranks[rank]):
        _check_action(schedule, rank, index, action)
        key = (action.kind, action.stage, action.microbatch)
        if key in at:
            raise _error(schedule, rank, action, f"stands there twice, as actions {at[key]} and {index}")
        at[key] = index
    for stage in schedule.stages[rank]:
        last_weights = max(
            _check_microbatch(schedule, rank, stage, each, at) for each in range(schedule.num_microbatches)
        )
        reduce = Action(ActionKind.REDUCE, stage)
        position = at.get((reduce.kind, stage, None))
        if position is None:
            raise _error(schedule, rank, reduce, "is missing: the gradients of the stage would never be exchanged")
        if position < last_weights:
            problem = f"(action {position}) comes before the stage's last weight gradient (action {last_weights})"
            raise _error(schedule, rank, reduce, problem)
        gather = Action(ActionKind.GATHER, stage)
        first = min(at[F, stage, each] for each in range(schedule.num_microbatches))
        if at.get((gather.kind, stage, None), -1) > first:
            raise _error(schedule, rank, gather, f"comes after the stage's first forward (action {first})")


def _check_action(schedule: Schedule, rank: int, index: int, action: Action) -> None:
    if not 0 <= action.stage < schedule.num_stages or schedule.placement[action.stage] != rank:
        held = ", ".join(map(str, schedule.stages[rank]))
        problem = f"(action {index}) is of a stage that this rank does not have; it has {held}"
        raise _error(schedule, rank, action, problem)
    if action.kind in WHOLE_STAGE:
        if action.microbatch is not None:
            raise _error(schedule, rank, action, f"(action {index}) is of a whole stage, not of a micro-batch")
    elif action.microbatch is None or not 0 <= action.microbatch < schedule.num_microbatches:
        there_are = f"there are 0 to {schedule.num_microbatches - 1}"
        raise _error(schedule, rank, action, f"(action {index}) is of a micro-batch that does not exist; {there_are}")


def _check_microbatch(schedule: Schedule, rank: int, stage: int, microbatch: int, at: _Positions) -> int:
    """Check what one stage does with one micro-batch; returns the position of the weight gradient."""

    def position(kind: ActionKind, missing: str) -> int:
        if (kind, stage, microbatch) not in at:
            raise _error(schedule, rank, Action(kind, stage, microbatch), missing)
        return at[kind, stage, microbatch]

    def in_order(first: ActionKind, second: ActionKind) -> None:
        if at[first, stage, microbatch] > at[second, stage, microbatch]:
            earlier, later = at[second, stage, microbatch], at[first, stage, microbatch]
            problem = f"(action {earlier}) comes before {Action(first, stage, microbatch)} (action {later})"
            raise _error(schedule, rank, Action(second, stage, microbatch), problem)

    position(F, "is missing: each stage computes each micro-batch forward")
    whole = (B, stage, microbatch) in at
    if whole and ((I, stage, microbatch) in at or (W, stage, microbatch) in at):
        part = I if (I, stage, microbatch) in at else W
        raise _error(
            schedule, rank, Action(part, stage, microbatch), "comes besides a full backward, which has it in it"
        )
    backward, weights = (B, B) if whole else (I, W)
    position(backward, "is missing: each stage computes each micro-batch backward, as B, or as I and W")
    position(weights, "is missing: without it the weights get no gradient of this micro-batch")
    in_order(F, backward)
    if not whole:
        in_order(I, W)
    for neighbour, needs, receive, makes, send in (
        (stage - 1, F, ActionKind.RECEIVE_ACTIVATION, backward, ActionKind.SEND_GRADIENT),
        (stage + 1, backward, ActionKind.RECEIVE_GRADIENT, F, ActionKind.SEND_ACTIVATION),
    ):
        remote = 0 <= neighbour < schedule.num_stages and schedule.placement[neighbour] != rank
        for kind in (receive, send):
            if remote:
                position(kind, f"is missing: stage {neighbour} is on another rank")
            elif (kind, stage, microbatch) in at:
                raise _error(schedule, rank, Action(kind, stage, microbatch), "has no other rank at its other end")
        if remote:
            in_order(receive, needs)
            in_order(makes, send)
    return at[weights, stage, microbatch]


def _check_messages(schedule: Schedule) -> None:
    """Compare, for each two ranks, what one sends with what the other receives; both exist, as ranks were checked."""
    sent: dict[tuple[int, int], list[Fact]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[Fact, Action]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.kind in SENDS or action.kind in RECEIVES:
                fact = delivered_by(action)
                step = {ActionKind.SEND_ACTIVATION: 1, ActionKind.RECEIVE_GRADIENT: 1}.get(action.kind, -1)
                peer = schedule.placement[action.stage + step]
                if action.peer != peer:
                    raise _error(schedule, rank, action, f"names rank {action.peer} as its other end; it is {peer}")
                if action.kind in SENDS:
                    sent[rank, peer].append(fact)
                else:
                    received[peer, rank].append((fact, action))
            elif action.peer is not None:
                raise _error(schedule, rank, action, f"names rank {action.peer} as its other end, but is no message")
    for (source, target), messages in received.items():
        for fact, (expected, action) in zip(sent[source, target], messages, strict=True):
            if fact != expected:
                found = f"the {fact[0]} stage {fact[1]}, micro-batch {fact[2]}"
                problem = f"is not the message that rank {source} sends at this place of their order, {found}"
                raise _error(schedule, target, action, problem)


def _check_progress(schedule: Schedule) -> None:
    stuck = play(steps_of(schedule, MessageMode.RENDEZVOUS)).stuck
    if not stuck:
        return  # then it comes to its end where fewer sides wait, too
    always = play(steps_of(schedule, MessageMode.BUFFERED)).stuck
    when = "even if sends do not wait" if always else "where a send waits for its receive"
    stuck = always or stuck
    places = [f"rank {rank} at {schedule.ranks[rank][index]} (action {index})" for rank, (index, _) in stuck.items()]
    more = f" and {len(places) - 4} more" if len(places) > 4 else ""
    rank, (index, _) = next(iter(stuck.items()))
    action = schedule.ranks[rank][index]
    raise ScheduleError(
        f"schedule {schedule.name!r} comes to a deadlock, {when}: {', '.join(places[:4])}{more} wait for each other.",
        rank=rank,
        stage=action.stage,
        microbatch=action.microbatch,
    )


def _error(schedule: Schedule, rank: int, action: Action, problem: str) -> ScheduleError:
    of_microbatch = "" if action.microbatch is None else f", micro-batch {action.microbatch}"
    return ScheduleError(
        f"schedule {schedule.name!r}, rank {rank}, stage {action.stage}{of_microbatch}: {action} {problem}.",
        rank=rank,
        stage=action.stage,
        microbatch=action.microbatch,
    )
