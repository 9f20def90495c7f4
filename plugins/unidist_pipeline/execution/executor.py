"""Runs one rank's list of actions, without a framework. `schedules.model` defines what each action demands.

Stage        what a framework implements: forward and backward of one stage on one micro-batch
Executor     runs the list of a rank over its stages and channels
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from unidist.timeline import Recorder
from unidist_pipeline.execution.channels import Channels
from unidist_pipeline.execution.messages import Message
from unidist_pipeline.schedules.facts import ACTIVATION_AT, GRADIENT, GRADIENT_AT, OUTPUT, Fact, delivered_by
from unidist_pipeline.schedules.model import COMPUTE, RECEIVES, SENDS, Action, ActionKind, Schedule

FORWARD_KINDS = frozenset((ActionKind.FORWARD, ActionKind.SEND_ACTIVATION, ActionKind.RECEIVE_ACTIVATION))


class Stage(ABC):
    """One stage of a model on this rank. Micro-batches are numbered from 0 in each run.

    The stage is created with the run's micro-batches (inputs and targets, which every rank has). Between `forward` and
    the last backward of a micro-batch it keeps what it needs.
    """

    @abstractmethod
    def forward(self, microbatch: int, received: Message | None) -> Message | None:
        """Compute the stage's forward pass.

        Args:
            microbatch: which.
            received: message of the stage before; None for the first stage. Its tensors belong to the stage.

        Returns:
            The message for the next stage: the form's `needs_gradient` says for which tensors `backward` gets a
            gradient. None from the last stage, which keeps its outputs and the loss.
        """

    @abstractmethod
    def backward(self, microbatch: int, gradients: Message | None) -> Message | None:
        """Compute gradients of the stage's weights, which the stage adds up, and of the tensors that it received.

        Args:
            microbatch: which.
            gradients: for the tensors with `needs_gradient` that `forward` returned, made as below. None for the last
                stage, which begins at its loss.

        Returns:
            Gradients for the received tensors with `needs_gradient`: the structure is a tuple of bools, one for each of
            these, whether it has a gradient; the tensors are the existing ones. None from the first stage.
        """

    @abstractmethod
    def backward_input(self, microbatch: int, gradients: Message | None) -> Message | None:
        """Compute the part of `backward` that the stage before waits for; arguments and result as there."""

    @abstractmethod
    def backward_weight(self, microbatch: int) -> None:
        """Compute the rest, after `backward_input`: gradients of the weights."""

    def reduce(self) -> None:  # noqa: B027 - nothing to do before the end of the run is a valid answer
        """Called after the stage's last weight gradient: its gradients may be exchanged from now on."""


class Executor:
    """Runs schedules on one rank.

    Args:
        channels: to the other ranks of the pipeline.
        stages: this rank's, by number.
        recorder: takes one event for each computing action.
    """

    def __init__(self, channels: Channels, stages: Mapping[int, Stage], recorder: Recorder | None = None) -> None:
        self._channels = channels
        self._stages = stages
        self._recorder = recorder or Recorder()
        self._made: dict[Fact, Message] = {}

    def run(self, schedule: Schedule, rank: int, *, forward_only: bool = False) -> None:
        """Run the list of `rank`, after `Channels.begin_run`. Every rank of the pipeline runs its list.

        Args:
            schedule: for all ranks, equal on each.
            rank: in the pipeline.
            forward_only: skip everything that belongs to backward passes.

        Raises:
            PeerLostError: another rank is lost, or cannot continue.
        """
        self._made.clear()
        actions = schedule.ranks[rank]
        for index, action in enumerate(actions):
            if forward_only and action.kind not in FORWARD_KINDS:
                continue
            try:
                self._do(action, schedule)
            except Exception as error:
                error.add_note(f"in action {index} of rank {rank} of the pipeline, {action} of {schedule.name}")
                raise
        self._channels.wait_sends()
        assert not self._made, f"made and never used: {list(self._made)}"

    def _do(self, action: Action, schedule: Schedule) -> None:
        kind = action.kind
        if kind in COMPUTE:
            timeline = self._recorder.timeline
            start = time.monotonic_ns() if timeline is not None else 0
            self._compute(action, schedule)
            if timeline is not None:
                timeline.record(f"stage {action.stage}", str(action), start, time.monotonic_ns())
        elif kind in SENDS:
            assert action.peer is not None
            assert action.microbatch is not None
            word = OUTPUT if kind is ActionKind.SEND_ACTIVATION else GRADIENT
            message = self._made.pop((word, action.stage, action.microbatch))
            self._channels.send(delivered_by(action), message, to=action.peer)
        elif kind in RECEIVES:
            assert action.peer is not None
            self._channels.receive(delivered_by(action), source=action.peer)
        elif kind is ActionKind.REDUCE:
            self._stages[action.stage].reduce()
        # ActionKind.GATHER: the parameters of a stage are always there

    def _compute(self, action: Action, schedule: Schedule) -> None:
        kind, number, microbatch = action.kind, action.stage, action.microbatch
        assert microbatch is not None
        stage = self._stages[number]
        if kind is ActionKind.BACKWARD_WEIGHT:
            stage.backward_weight(microbatch)
            return
        is_forward = kind is ActionKind.FORWARD
        neighbour = number - 1 if is_forward else number + 1
        received = self._received(is_forward, number, neighbour, microbatch, schedule.placement)
        if is_forward:
            made = stage.forward(microbatch, received)
        elif kind is ActionKind.BACKWARD:
            made = stage.backward(microbatch, received)
        else:
            made = stage.backward_input(microbatch, received)
        target = number + 1 if is_forward else number - 1
        if 0 <= target < len(schedule.placement):
            assert made is not None, f"{action} must pass something on"
            self._made[OUTPUT if is_forward else GRADIENT, number, microbatch] = made

    def _received(
        self, is_forward: bool, number: int, neighbour: int, microbatch: int, placement: Sequence[int]
    ) -> Message | None:
        if not 0 <= neighbour < len(placement):
            return None
        if placement[neighbour] == placement[number]:
            return self._made.pop((OUTPUT if is_forward else GRADIENT, neighbour, microbatch))
        return self._channels.wait_for((ACTIVATION_AT if is_forward else GRADIENT_AT, number, microbatch))
