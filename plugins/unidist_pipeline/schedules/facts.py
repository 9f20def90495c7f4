"""The rules of a pipeline: preconditions and results of each action, as facts.

A fact is a triple of a word, a stage and a micro-batch: ("output", 2, 0) says that the output of stage 2 for
micro-batch 0 is available, ("gradient", 2, 0) that the gradient of its input is, and ("activation at", 3, 0) that a
message has brought stage 3 its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from unidist_pipeline.schedules.model import Action, ActionKind

Fact: TypeAlias = tuple[str, int, int]

OUTPUT, GRADIENT = "output", "gradient"
ACTIVATION_AT, GRADIENT_AT = "activation at", "gradient at"
"""Arrived at a stage by a message."""
READY_FOR_ACTIVATION, READY_FOR_GRADIENT = "ready for the activation", "ready for the gradient"
"""The rank of a stage stands at the receive."""


def made_by(action: Action) -> Fact | None:
    """Return the result of computing `action` that other stages use: output, or gradient of the input."""
    microbatch = _microbatch(action)
    if action.kind is ActionKind.FORWARD:
        return (OUTPUT, action.stage, microbatch)
    if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
        return (GRADIENT, action.stage, microbatch)
    return None


def needed_by(action: Action, placement: Sequence[int], *, by_message: bool) -> tuple[Fact, ...]:
    """Return the facts that computing `action` needs from other actions.

    Args:
        action: one that computes.
        placement: the rank of each stage.
        by_message: results of another rank arrive by a message; False: they are available as soon as they are made.
    """
    stage, microbatch = action.stage, _microbatch(action)
    if action.kind is ActionKind.FORWARD:
        if stage == 0:
            return ()
        if by_message and placement[stage - 1] != placement[stage]:
            return ((ACTIVATION_AT, stage, microbatch),)
        return ((OUTPUT, stage - 1, microbatch),)
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return ((GRADIENT, stage, microbatch),)
    own = (OUTPUT, stage, microbatch)
    if stage + 1 == len(placement):
        return (own,)
    if by_message and placement[stage + 1] != placement[stage]:
        return (own, (GRADIENT_AT, stage, microbatch))
    return (own, (GRADIENT, stage + 1, microbatch))


def delivered_by(action: Action) -> Fact:
    """Return the fact that a message brings; equal for its send and its receive."""
    microbatch = _microbatch(action)
    match action.kind:
        case ActionKind.SEND_ACTIVATION:
            return (ACTIVATION_AT, action.stage + 1, microbatch)
        case ActionKind.RECEIVE_ACTIVATION:
            return (ACTIVATION_AT, action.stage, microbatch)
        case ActionKind.SEND_GRADIENT:
            return (GRADIENT_AT, action.stage - 1, microbatch)
        case ActionKind.RECEIVE_GRADIENT:
            return (GRADIENT_AT, action.stage, microbatch)
        case _:
            raise AssertionError(f"{action} is no message")


def awaited_by(action: Action) -> Fact:
    """Return the fact that the receiver of a message has reached its receive."""
    word, stage, microbatch = delivered_by(action)
    return (READY_FOR_ACTIVATION if word == ACTIVATION_AT else READY_FOR_GRADIENT, stage, microbatch)


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None, f"{action} has no micro-batch"
    return action.microbatch
