"""Messages of workers to servers, of servers to their replicas, and the answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unidist.control import Message
from unidist_parameter_server.wire.layout import SegmentLayout


@dataclass(frozen=True)
class Rules:
    """The rules of all parameters: name and options of each different one, and which of them a parameter has."""

    different: tuple[tuple[str, dict[str, Any]], ...]
    which: tuple[int, ...]


# From a worker; see `client.link`. The answer is `Done`, after `ValuesFollow` and arrays where these are asked for.


class PusherHere(Message):
    """A worker's first message. -> Welcome.

    Args:
        worker: its number.
        finished: steps that it has finished.
        takeover: the server is to take the segment over: the one that had it is lost.
        layout: of the segment.
    """

    worker: int
    finished: int
    takeover: bool
    layout: SegmentLayout


class Fill(Message):
    """The contents of these shards follow."""

    indices: tuple[int, ...]


class Fetch(Message):
    """Send the values of these shards."""

    indices: tuple[int, ...]


class ReadContents(Message):
    """Send all arrays of these shards."""

    indices: tuple[int, ...]


class Push(Message):
    """Apply what follows to these shards.

    Args:
        indices: of the shards.
        number: of the push.
        rules: by which it is applied.
        present: the parameters that it is for.
        factor: of all of it.
        fetches: the values are sent back.
        versions: of each shard when the worker read it; None: it does not matter.
    """

    indices: tuple[int, ...]
    number: int
    rules: Rules
    present: tuple[bool, ...]
    factor: float
    fetches: bool
    versions: tuple[int, ...] | None


class PushTogether(Message):
    """A gradient of all shards for a synchronous step follows.

    Args:
        number: of the push.
        label: of the step.
        rules: by which it is applied.
        present: the parameters that it is for.
        waits: for the step.
        timeout_sec: longest wait.
    """

    number: int
    label: int
    rules: Rules
    present: tuple[bool, ...]
    waits: bool
    timeout_sec: float


class FinishStep(Message):
    """The worker has finished so many steps, and waits until the others are at most `bound` behind it."""

    finished: int
    bound: int | None
    timeout_sec: float


class ReadLog(Message):
    """Tell the last pushes."""


class Retire(Message):
    """Nobody has to wait for the worker any more."""


class Leave(Message):
    """The worker has ended. There is no answer."""


# To a replica


class Replicate(Message):
    """A server's first message to the one that is to have a copy of its segment. -> Welcome."""

    layout: SegmentLayout


class CopyShard(Message):
    """The contents of a shard follow."""

    index: int


class CopyChange(Message):
    """A change that was applied to a shard follows.

    Args:
        index: of the shard.
        version: that it has with it.
        pushes: worker and number of each that is in it.
        factor: of all of it.
        rules: by which it is applied; None: as the change before.
        present: the parameters that it is for; None: as the change before.
    """

    index: int
    version: int
    pushes: tuple[tuple[int, int], ...]
    factor: float
    rules: Rules | None
    present: tuple[bool, ...] | None


class Flush(Message):
    """Say when all is applied. -> Applied."""


# From a server


class Welcome(Message):
    """Number of synchronous steps that were applied."""

    step: int


class ValuesFollow(Message):
    """Arrays follow, and then the answer."""


class Done(Message):
    """The answer.

    Args:
        versions: of the shards that were read, or changed.
        step: number of synchronous steps that were applied.
        counts: the gradient counts in its step.
        log: worker and number of the last pushes of each shard.
        clocks: of all workers.
    """

    versions: tuple[int, ...] = ()
    step: int = 0
    counts: bool = True
    log: tuple[tuple[tuple[int, int], ...], ...] = ()
    clocks: tuple[int, ...] = ()


class Applied(Message):
    """A replica has applied all that it was told."""


__all__ = [
    "Applied", "CopyChange", "CopyShard", "Done", "Fetch", "Fill", "FinishStep", "Flush", "Leave", "Push",
    "PushTogether", "ReadContents", "ReadLog", "Replicate", "Retire", "Rules", "ValuesFollow", "Welcome", "PusherHere",
]  # fmt: skip
