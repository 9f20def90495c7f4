"""Schedules as steps that need and give facts, for three kinds of executors: they differ in who waits at a message."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from unidist_pipeline.schedules.facts import awaited_by, delivered_by, made_by, needed_by
from unidist_pipeline.schedules.model import COMPUTE, RECEIVES, SENDS, Action, ActionKind, Schedule
from unidist_pipeline.schedules.playback import PlaybackStep


class MessageMode(StrEnum):
    """When executors wait at a message."""

    ASYNCHRONOUS = "asynchronous"
    """Nobody: computing waits for what it needs. Messages are under way while ranks compute."""
    BUFFERED = "buffered"
    """The receiver, until the message is there."""
    RENDEZVOUS = "rendezvous"
    """Both, until the other side is there and the message has passed."""


def steps_of(
    schedule: Schedule, messages: MessageMode, *, duration: Callable[[Action], float] = lambda action: 0.0
) -> list[list[PlaybackStep]]:
    """Return the schedule for `playback.play`, one step for each action.

    Args:
        schedule: one whose receives come before what needs them, as `validate` demands.
        messages: who waits.
        duration: how long each action takes; for a send, how long its message is under way.
    """
    return [
        [_step(action, schedule, messages, duration, gathered) for action in actions]
        for actions in schedule.ranks
        for gathered in [{action.stage for action in actions if action.kind is ActionKind.GATHER}]
    ]


def _step(
    action: Action, schedule: Schedule, messages: MessageMode, duration: Callable[[Action], float], gathered: set[int]
) -> PlaybackStep:
    kind = action.kind
    if kind in COMPUTE:
        needs = needed_by(action, schedule.placement, by_message=True)
        if kind is ActionKind.FORWARD and action.stage in gathered:
            needs = (*needs, ("parameters", action.stage, 0))
        return PlaybackStep(needs, made_by(action), duration(action))
    if kind in SENDS:
        if messages is MessageMode.RENDEZVOUS:
            return PlaybackStep((awaited_by(action),), None, duration(action), announces=delivered_by(action))
        return PlaybackStep((), delivered_by(action), delay=duration(action))
    if kind in RECEIVES:
        if messages is MessageMode.ASYNCHRONOUS:
            return PlaybackStep()
        if messages is MessageMode.BUFFERED:
            return PlaybackStep((delivered_by(action),))
        return PlaybackStep((delivered_by(action),), None, duration(action), announces=awaited_by(action))
    if kind is ActionKind.GATHER:
        return PlaybackStep((), ("parameters", action.stage, 0), delay=duration(action))
    return PlaybackStep()  # an exchange of gradients goes on beside what follows; nothing in the schedule waits for it
