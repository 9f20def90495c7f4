"""All messages of the control plane, and the number of their protocol.

Each conversation has a part here: a client speaks first, and its first message says which conversation it is. Plugins
have their own messages, and the monitors of the ranks theirs (`unidist.waits.messages`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unidist._version import __version__
from unidist.control.codec import Message
from unidist.launcher import SideProcess
from unidist.topology import Topology

PROTOCOL = 2
"""Changes whenever a message changes: here, in `unidist.waits`, or between ranks that train. A test sees to it."""

RELEASE = f"{__version__} (protocol {PROTOCOL})"
"""What has to be equal on all hosts of a job."""


# In several conversations


class Beat(Message):
    """I am alive."""


class Failed(Message):
    """There is an error, or no place for you.

    Args:
        kind: of the error.
        text: says what is wrong.
        ranks: that are to blame.
    """

    kind: str
    text: str
    ranks: tuple[int, ...] = ()


# From the agent of a host to the launcher


class HostFacts(Message):
    """An agent's first message: what its host is like.

    Args:
        host: index of the agent.
        name: of the host.
        address: at which the other hosts reach it.
        launcher: at which it reaches the launcher.
        port: one that is free there.
        ports: others that are, as many as were asked for.
        role: of a host without ranks; "": it has ranks.
        role_index: counts the hosts of a role.
        cores: that it may use.
        pid: of the agent.
        workers: of an elastic job, when the agent comes back: number, seat, process, and whether it has ended.
        terminating: it was asked to end while the launcher was away.
    """

    host: int
    name: str
    address: str
    launcher: str
    port: int
    ports: tuple[int, ...]
    role: str
    role_index: int
    cores: int
    pid: int
    workers: tuple[tuple[int, int, int, bool], ...] = ()
    terminating: bool = False


class Goodbye(Message):
    """The agent ends because it was told to."""


class Terminating(Message):
    """Somebody, a scheduler for example, asks the agent to end."""


class Started(Message):
    """The ranks run. `pids`: their processes."""

    pids: tuple[int, ...]


class WorkerStarted(Message):
    """A worker runs."""

    worker: int
    pid: int


class Refused(Message):
    """What was to be started cannot be.

    Args:
        text: says why.
        worker: that was to be started, of an elastic job.
    """

    text: str
    worker: int | None = None


class Output(Message):
    """A rank has written this. `rank`: or the seat of a worker; `stream`: number of the file."""

    rank: int
    stream: int
    data: bytes


class Progress(Message):
    """Progress reports, each with its rank, or the number of the worker."""

    reports: tuple[tuple[int, dict[str, Any]], ...]


class Exits(Message):
    """Ranks have ended: rank, process, exit code."""

    exits: tuple[tuple[int, int, int], ...]


class Done(Message):
    """All ranks of the host have ended, and all that they wrote was sent."""


class WorkerEnded(Message):
    """A worker has ended; how, is told when all that it wrote was sent."""

    worker: int


class WorkerExit(Message):
    """How a worker has ended."""

    worker: int
    pid: int
    returncode: int


class Listening(Message):
    """The port at which the agent listens for other agents; 0: it cannot."""

    port: int


class LinkState(Message):
    """Whether another agent is reached, and for how long nothing was heard of it."""

    peer: int
    reached: bool
    silent_sec: float


class SideStarted(Message):
    """A process beside the ranks runs."""

    number: int
    pid: int


class SideRefused(Message):
    """A process beside the ranks cannot be started; `text` says why."""

    number: int
    text: str


class SideOutput(Message):
    """A process beside the ranks has written this."""

    number: int
    data: bytes


class SideExit(Message):
    """A process beside the ranks has ended."""

    number: int
    returncode: int


# From the launcher to agents


class Start(Message):
    """Start the ranks.

    Args:
        places: of the host's ranks.
        address: at which the other hosts reach this one.
        master: address of the first host.
        master_port: one that is free there.
        generation: of the world.
        values: the launcher serves values that processes share.
        of_each: variables of each rank; empty: there are none.
    """

    places: tuple[Topology, ...]
    address: str
    master: str
    master_port: int
    generation: int
    values: bool
    of_each: tuple[dict[str, str], ...] = ()


class StartWorker(Message):
    """Start a worker.

    Args:
        worker: its number.
        seat: label under which its output is shown.
        slots: of the host.
        place: for those who look at the variables before `init()`.
        address: at which the other hosts reach this one.
        master: address for who needs one.
        values: the launcher serves values that processes share.
    """

    worker: int
    seat: int
    slots: int
    place: Topology
    address: str
    master: str
    values: bool


class Signal(Message):
    """Send signal `number` to ranks. None: to all, workers too."""

    number: int
    ranks: tuple[int, ...] | None = None


class SignalWorkers(Message):
    """Send signal `number` to workers."""

    number: int
    workers: tuple[int, ...]


class Taken(Message):
    """The launcher has taken one more message of output, with so many bytes."""

    num_bytes: int


class SideStart(Message):
    """Start a process beside the ranks; `address` is that at which the other hosts reach this one."""

    number: int
    process: SideProcess
    address: str


class SideSignal(Message):
    """Send signal `number` to processes beside the ranks."""

    number: int
    chosen: tuple[int, ...]


class Listen(Message):
    """Listen for other agents at this address."""

    address: str


class Peers(Message):
    """Keep links to these agents, and to no others: index, address, port."""

    peers: tuple[tuple[int, str, int], ...]


class End(Message):
    """End what runs on the host, and yourself."""


# Ranks that meet


class RankHere(Message):
    """A rank's first message: which meeting it comes to, and its place there."""

    generation: int
    epoch: int
    rank: int
    node_rank: int
    world_size: int


class Give(Message):
    """A rank's payload of a round, in base64: only the ranks look into it."""

    generation: int
    round: int
    payload: str


class GiveUp(Message):
    """A rank has waited long enough for a round."""

    generation: int
    round: int


class LeaveMeeting(Message):
    """A rank needs the meeting no more."""

    generation: int


class Gathered(Message):
    """To the ranks: all payloads of a round, each with the number of ranks in a row that gave it."""

    round: int
    runs: tuple[tuple[str, int], ...]


# Values that processes share; see `key_values`


class Member(Message):
    """The first message: a rank, or None."""

    rank: int | None


class SetValue(Message):
    """Set a value."""

    key: str
    value: bytes


class ClaimValue(Message):
    """Set a value unless there is one."""

    key: str
    value: bytes


class GetValues(Message):
    """Ask for values. `of`: processes beside the ranks that are to set them."""

    keys: tuple[str, ...]
    of: tuple[str, ...] = ()


class LeaveValues(Message):
    """A rank whose connection ends is not lost."""


class Values(Message):
    """The answer to all that ask and set.

    Args:
        values: that were asked for; None where there is none yet.
        lost: ranks that are.
        ended: processes beside the ranks that have ended, of those that were named, and why.
    """

    values: tuple[bytes | None, ...] = ()
    lost: tuple[int, ...] = ()
    ended: dict[str, str] = field(default_factory=dict)


# From a worker of an elastic job to the coordinator; see `elastic.coordinator`


class Ready(Message):
    """I wait for the next world.

    Args:
        generation: of the last one; -1: there was none.
        progress: commits that my state has seen; -1: I have none.
        reason: why I cannot go on; "": the coordinator wants a change.
        patience: in seconds; a rank that does not come back in this time is taken for lost.
    """

    generation: int
    progress: int
    reason: str
    patience: float


class WorkerHere(Message):
    """A worker's first message; see `elastic.resumable_coordinator` for one that comes back."""

    worker: int
    pid: int = 0
    generation: int = -1
    waits: Ready | None = None
    leaving: bool = False
    gives_up: str = ""
    detached: bool = False


@dataclass(frozen=True)
class StepTimeReport:
    """What a heartbeat tells of the steps of training. Sums start when the process starts.

    Args:
        generation: in which the process trains; -1: it has not begun.
        commits: in which the process took part.
        progress: commits of the whole job that this process's state includes.
        updates: of its optimizers; 0 if the script has none.
        timed: commits whose step was measured: all but the first of each generation.
        own_sec: seconds of these steps in which it did not wait for other ranks.
        waited_sec: seconds of these steps in which it did.
        restore_sec: seconds from joining the generation to the call of the training function: connecting, restoring
            and synchronising; None: there was nothing to restore.
        first_step_sec: seconds from that call to the first commit; None before that commit.
    """

    generation: int = -1
    commits: int = 0
    progress: int = 0
    updates: int = 0
    timed: int = 0
    own_sec: float = 0.0
    waited_sec: float = 0.0
    restore_sec: float | None = None
    first_step_sec: float | None = None


class WorkerBeat(Message):
    """I am alive, have taken so many steps, and wait for others, or do not."""

    steps: int
    waits: bool = False
    step_times: StepTimeReport = StepTimeReport()


class Leaving(Message):
    """I was asked to end: let me go at the next commit."""


class Detached(Message):
    """I have left the world in good order."""


class StateLost(Message):
    """What the members held is lost: end the job."""

    reason: str


class Happened(Message):
    """For the job's log."""

    event: str
    fields: Mapping[str, str | int | float]


# From the coordinator to workers


class Welcome(Message):
    """You are awaited. `is_first`: in the first world; `beat_sec`: time between two beats."""

    is_first: bool
    beat_sec: float


class Standby(Message):
    """There is no room for you now: wait as long as it takes."""


class Change(Message):
    """Come back at your next commit: others come, or these workers go."""

    generation: int
    leaving: tuple[int, ...]
    joining: bool


class Assign(Message):
    """Your place in the next world.

    Args:
        generation: its number.
        place: of the worker.
        progress: commits that the state of rank 0 has seen.
        needs_sync: not all members hold that state.
        beat_sec: time between two beats.
    """

    generation: int
    place: Topology
    progress: int
    needs_sync: bool
    beat_sec: float


class Dismissed(Message):
    """There is no place for you any more."""


class WorldEnded(Message):
    """Your generation has ended: stop what you do, restore, come back. `ranks`: that were lost."""

    generation: int
    text: str
    ranks: tuple[int, ...] = ()


__all__ = [
    "Assign", "Beat", "Change", "ClaimValue", "Detached", "Dismissed", "Done", "End", "Exits", "Failed", "Gathered",
    "GetValues", "Give", "GiveUp", "Goodbye", "Happened", "HostFacts", "LeaveMeeting", "LeaveValues", "Leaving",
    "LinkState", "Listen", "Listening", "Member", "Message", "Output", "PROTOCOL", "Peers", "Progress", "RELEASE",
    "RankHere", "Ready", "Refused", "SetValue", "SideExit", "SideOutput", "SideRefused", "SideSignal", "SideStart",
    "SideStarted", "Signal", "SignalWorkers", "Standby", "Start", "StartWorker", "Started", "StateLost",
    "StepTimeReport", "Taken", "Terminating", "Values", "Welcome", "WorkerBeat", "WorkerEnded", "WorkerExit",
    "WorkerHere", "WorkerStarted", "WorldEnded",
]  # fmt: skip
