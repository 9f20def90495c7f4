"""The data model: a schedule is one list of actions for each rank of the pipeline.

Notation: `2F0` is the forward of stage 2 on micro-batch 0. `F` forward, `B` full backward, `I` backward for the input,
`W` backward for the weights; `SEND_F`, `RECV_F` move activations, `SEND_B`, `RECV_B` gradients; `UNSHARD` gathers a
stage's parameters, `REDUCE_GRAD` exchanges its gradients on the data axis. These are the words of
`torch.distributed.pipelining`, so its lists can be read.

An executor runs a list action by action:

- *Computing* actions run to their end. They wait for their input: the message that `RECV_F` or `RECV_B` of the same
  stage and micro-batch receives or, if the neighbouring stage is on the same rank, its result.
- *Receiving* actions begin to receive and do not wait.
- *Sending* actions begin to send the result of the stage's action before them, and do not wait; all sends are waited
  for at the end.
- A message carries everything that a stage passes on for one micro-batch. Messages between two ranks arrive in the
  order of their sends, and the receives are listed in the same order, so they need no other mark.

A list is also free of deadlock for an executor that waits at every message for the other side: see `validation`. Values
for stages after the next one (a skip connection) travel through the stages between.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from unidist.errors import ConfigurationError, UsageError


class ScheduleError(UsageError):
    """A schedule breaks a rule: fix the function or the file that made it.

    Attributes:
        rank: the rank of the pipeline with the error; None if it concerns several.
        stage: the stage, likewise.
        microbatch: the micro-batch, likewise.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, stage: int | None = None, microbatch: int | None = None
    ) -> None:
        super().__init__(message)
        self.rank, self.stage, self.microbatch = rank, stage, microbatch


class ActionKind(StrEnum):
    """Kinds of actions."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of input and weights at once; quicker than one after the other where nothing is gained between."""
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_ACTIVATION = "SEND_F"
    RECEIVE_ACTIVATION = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECEIVE_GRADIENT = "RECV_B"
    GATHER = "UNSHARD"
    REDUCE = "REDUCE_GRAD"


COMPUTE = frozenset((ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT))
SENDS = frozenset((ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT))
RECEIVES = frozenset((ActionKind.RECEIVE_ACTIVATION, ActionKind.RECEIVE_GRADIENT))
WHOLE_STAGE = frozenset((ActionKind.GATHER, ActionKind.REDUCE))
"""Actions of a stage that belong to no micro-batch."""

_NOTATION = re.compile(r"(\d+)([A-Z_]+?)(\d*)")


class Action(NamedTuple):
    """One action of a rank.

    Attributes:
        kind: of the action.
        stage: of the rank: `SEND_F` of stage 2 sends that stage's output, `RECV_F` of stage 3 receives it.
        microbatch: from 0; None for the kinds in `WHOLE_STAGE`.
        peer: of a message, the rank of the pipeline at its other end; otherwise None.
    """

    kind: ActionKind
    stage: int
    microbatch: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        """Return the notation of the module's text."""
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"


def parse_action(text: str) -> Action:
    """Return the action that `text` denotes, without its peer. Raises ScheduleError for anything else."""
    found = _NOTATION.fullmatch(text)
    kinds = {kind.value: kind for kind in ActionKind}
    if found is None or found[2] not in kinds:
        raise ScheduleError(
            f"{text!r} is not an action. Write stage, kind, micro-batch, as in 2F0; kinds are {', '.join(kinds)}."
        )
    kind = kinds[found[2]]
    if (kind in WHOLE_STAGE) is bool(found[3]):
        needs = "no micro-batch" if kind in WHOLE_STAGE else "a micro-batch"
        raise ScheduleError(f"{text!r} is not an action: {kind.value} has {needs}.")
    return Action(kind, int(found[1]), int(found[3]) if found[3] else None)


@dataclass(frozen=True)
class StageTimes:
    """The times of one stage's actions for one micro-batch, in any single unit; what a schedule is searched for.

    Args:
        forward: of a forward.
        backward_input: of the gradient of the input.
        backward_weight: of the gradient of the weights.
        message: from the end of an action until another rank has its result.
        kept_for_weight: of what a stage holds of a micro-batch, the part that it still holds between the backward for
            the input and that for the weights. If in doubt 1, which holds too much rather than too little.

    Raises:
        ConfigurationError: a number is negative or not finite, or the part larger than 1.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    message: float = 0.0
    kept_for_weight: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < float("inf"):
                raise ConfigurationError(f"a stage with {name}={value:g}: it must be 0 or more, and finite.")
        if self.kept_for_weight > 1:
            raise ConfigurationError(f"kept_for_weight={self.kept_for_weight:g} is a part of 1.")


@dataclass(frozen=True)
class PipelineSize:
    """The size that a schedule is built for, and what one that is searched goes by.

    Args:
        num_ranks: ranks of the pipeline.
        num_microbatches: pieces of the batch.
        stages_per_rank: stages that each rank holds; the model is cut into `num_ranks * stages_per_rank` of them.
        times: for schedules that are searched (`ScheduleSpec.searched`); others do not look at them.
        limit: likewise, the micro-batches that a rank may hold; None: the schedule's own.
        messages: False if only the order of computing matters: then `complete` leaves out the rest. Such a schedule can
            neither be run nor simulated, but it tells what each rank holds.

    Raises:
        ConfigurationError: one of them is below 1.
    """

    num_ranks: int
    num_microbatches: int
    stages_per_rank: int = 1
    times: StageTimes = StageTimes()
    limit: float | None = None
    messages: bool = True

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_microbatches", "stages_per_rank"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"a pipeline with {name}={getattr(self, name)}: it must be 1 or more.")
        if self.limit is not None and not self.limit >= 1:
            raise ConfigurationError(f"a pipeline with limit={self.limit:g}: a rank holds 1 micro-batch or more.")

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return self.num_ranks * self.stages_per_rank


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank of a pipeline in one step. Built by `complete`, checked by `validate`.

    Args:
        name: for lists and drawings.
        num_microbatches: pieces of the batch.
        placement: `placement[stage]` is the rank of the pipeline that holds the stage.
        ranks: `ranks[rank]` is the list of that rank.
    """

    name: str
    num_microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return len(self.placement)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank holds, in ascending order."""
        held: list[list[int]] = [[] for _ in self.ranks]
        for stage, rank in enumerate(self.placement):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    def compute(self) -> list[list[Action]]:
        """Return only the computing actions of each rank, in order."""
        return [[action for action in actions if action.kind in COMPUTE] for actions in self.ranks]


def round_robin(size: PipelineSize) -> tuple[int, ...]:
    """Return the placement of stage s on rank `s % num_ranks`."""
    return tuple(stage % size.num_ranks for stage in range(size.num_stages))


def v_shaped(size: PipelineSize) -> tuple[int, ...]:
    """Return the placement that goes to the last rank, back to the first, and so on."""
    there: Sequence[int] = range(size.num_ranks)
    return tuple(rank for lap in range(size.stages_per_rank) for rank in (there if lap % 2 == 0 else reversed(there)))
