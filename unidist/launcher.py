"""The launcher: starts the processes of a job on one kind of machine or cluster."""

from __future__ import annotations

import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

from unidist.engine import Availability
from unidist.errors import ConfigurationError
from unidist.mesh import DATA_AXIS, Mesh
from unidist.registry import load_object

__all__ = [
    "AUTO",
    "DurableOptions",
    "ElasticLimits",
    "Fallback",
    "Host",
    "Job",
    "JobObserver",
    "KnowsHosts",
    "Launcher",
    "LauncherSpec",
    "ObservedJob",
    "ObservedWorker",
    "RemoteShell",
    "RunsElasticJobs",
    "SharedValues",
    "SideProcess",
    "StartsSideProcesses",
    "interval_of",
]


@dataclass(frozen=True)
class Host:
    """A host of a job, and how many ranks it takes.

    Args:
        name: as the user wrote it.
        slots: the most ranks that run there.
    """

    name: str
    slots: int


@dataclass(frozen=True)
class RemoteShell:
    """The remote shell for launchers that run commands on other hosts, by ssh for example.

    Args:
        command: the program, with arguments ("ssh", "ssh -F my_config").
        port: of the hosts' ssh servers; None leaves it to the program.
        identity_file: private key; None leaves it to the program.
    """

    command: str = "ssh"
    port: int | None = None
    identity_file: Path | None = None


AUTO: Final = "auto"


@dataclass(frozen=True)
class DurableOptions:
    """Options of durable checkpoints.

    Args:
        folder: for the checkpoints alone, in a file system that all ranks share.
        interval: between two of them; None: chosen by their cost, see `CheckpointSchedule`.
        keep: complete ones that stay.

    Raises:
        ConfigurationError: a value is out of range.
    """

    folder: Path
    interval: timedelta | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        if self.interval is not None and self.interval <= timedelta(0):
            raise ConfigurationError(
                f"checkpoint interval of {self.interval.total_seconds():g} seconds: give more than 0, or {AUTO!r}"
            )
        if self.keep < 1:
            raise ConfigurationError(f"{self.keep} checkpoints to keep: give at least 1")

    def try_folder(self) -> None:
        """Make the folder, and try to write there: better now than at the first checkpoint, hours later.

        Raises:
            OSError: it cannot be made or written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder):
            pass

    def variables(self) -> dict[str, str]:
        """Return the variables by which a rank reads them again."""
        interval = AUTO if self.interval is None else f"{self.interval.total_seconds():g}"
        return {
            "UNIDIST_CHECKPOINT_DIR": str(self.folder),
            "UNIDIST_CHECKPOINT_INTERVAL_SEC": interval,
            "UNIDIST_CHECKPOINT_KEEP": str(self.keep),
        }


def interval_of(value: float | str) -> timedelta | None:
    """Return an interval that is given in seconds, or as "auto", which is None.

    Raises:
        ConfigurationError: it is neither.
    """
    if value == AUTO:
        return None
    try:
        return timedelta(seconds=float(value))
    except (ValueError, OverflowError):
        raise ConfigurationError(f"checkpoint interval {value!r}: give a number of seconds, or {AUTO!r}") from None


@dataclass(frozen=True)
class Fallback:
    """Describes how a job restarts from its latest checkpoint when too few ranks are left for one replica of its model.

    Args:
        strategy: line of the strategies that it has then.
        meshes: of these, by number of ranks; of numbers that they fit.
    """

    strategy: str
    meshes: Mapping[int, Mesh]


@dataclass(frozen=True)
class ElasticLimits:
    """Limits for the number of ranks of a job, which may change while it runs.

    Args:
        min_num: minimum number of ranks; with fewer the job waits for replacements.
        max_num: maximum number of ranks.
        discovery_script: command that prints the hosts, run repeatedly; None: only `Job.hosts`.
        slots_per_host: ranks on a host that the script lists without a number.
        num_spares: processes on each host that stand by to take the place of a rank that is lost.
        reset_limit: number of times that the world may change; None: any number.
        timeout: longest wait for `min_num` ranks.
        cooldown: shortest and longest pause in seconds before a slot in which a rank has failed is used again;
            None: the launcher's default.
        stall: a rank that has done no step for longer, while others have or wait for it, counts as hung; None: never.
        event_log: file for the job's events; None: no file.
        state_dir: folder in which the launcher keeps what another one needs to take its place; None: the job dies with
            its launcher.
        orphan_timeout: how long the job's processes look for a launcher that died, before they end.
        durable: checkpoints that the states of the job make; None: what the script and the environment say.
        mesh: of the job's strategies at the beginning; ranks train in whole replicas of a model that it divides. None:
            it divides no model.
        fallback: what to do when there are too few ranks for one replica of the model; None: the job waits, and ends.
    """

    min_num: int
    max_num: int
    discovery_script: str | None = None
    slots_per_host: int | None = None
    num_spares: int = 0
    reset_limit: int | None = None
    timeout: timedelta = timedelta(seconds=600)
    cooldown: tuple[float, float] | None = None
    stall: timedelta | None = None
    event_log: Path | None = None
    state_dir: Path | None = None
    orphan_timeout: timedelta = timedelta(seconds=60)
    durable: DurableOptions | None = None
    mesh: Mesh | None = None
    fallback: Fallback | None = None

    @property
    def replica_size(self) -> int:
        """Number of ranks that hold one copy of the model together."""
        return 1 if self.mesh is None else self.mesh.world_size // self.mesh.size(DATA_AXIS)

    @property
    def min_ranks(self) -> int:
        """The fewest ranks that can train: `min_num`, in whole replicas."""
        return -(-self.min_num // self.replica_size) * self.replica_size

    @property
    def needs(self) -> str:
        """What a job cannot go without, for messages."""
        if self.replica_size == 1:
            return f"--min-np is {self.min_num}"
        return f"ranks train in whole replicas of {self.replica_size} ({self.mesh!r}), {self.min_ranks} ranks at least"


@dataclass(frozen=True)
class SideProcess:
    """A process of a job beside its ranks: a parameter server, an evaluator, a worker that prepares data.

    It is started before the ranks and ended after them: SIGTERM, the job's grace period, SIGKILL. It gets the job's
    variables and secret but no rank, strategy or engine: `init()` in it makes a world of one process. It finds the
    others by `unidist.control.job_values`.

    Args:
        command: program and arguments.
        role: what it does ("ps", "evaluator", "data", or another word): `ud.role()` there. Of letters, digits, "-"
            and "_".
        index: counts the processes of a role.
        env: variables for it alone, on top of those of the job.
        host: index of the job's host that it runs on; None: the launcher spreads such processes over the hosts.
        is_vital: when it fails (a signal, or an exit code other than 0) before the ranks have ended, the job ends with
            exit code 1.
        label: precedes the lines that it prints; default: role and index.

    Raises:
        ConfigurationError: there is no command, or the role, index or host is none.
    """

    command: tuple[str, ...]
    role: str
    index: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    host: int | None = None
    is_vital: bool = False
    label: str = ""

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigurationError(f"side process {self.role} {self.index}: give a command")
        if re.fullmatch(r"[A-Za-z0-9_-]+", self.role) is None:
            raise ConfigurationError(f"side process of the role {self.role!r}: a role has letters, digits, - and _")
        if self.index < 0 or (self.host is not None and self.host < 0):
            raise ConfigurationError(
                f"side process {self.role} {self.index} on host {self.host}: index and host are counted from 0"
            )

    @property
    def name(self) -> str:
        """The process in messages: its label, or role and index ("ps 0")."""
        return self.label or f"{self.role} {self.index}"


@dataclass(frozen=True)
class ObservedWorker:
    """A process of a job whose launcher has died, as another launcher finds it.

    Args:
        number: of the process, counted over the whole job.
        host: index of its host.
        host_name: of the host.
        seat: label of its output.
        pid: of the process.
        rank: in the present generation; None: it is in none.
    """

    number: int
    host: int
    host_name: str
    seat: int
    pid: int
    rank: int | None


class SharedValues(Protocol):
    """Values shared by the processes of a job; `unidist.control.KeyValues` is the implementation."""

    def set(self, key: str, value: bytes) -> None:
        """Set a value."""

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of these keys, None where there is none yet. Does not wait."""


class ObservedJob(ABC):
    """A running job, as its observers see it. To be called in the launcher's thread only."""

    @property
    @abstractmethod
    def command(self) -> tuple[str, ...]:
        """Program and arguments of the ranks."""

    @property
    @abstractmethod
    def num_proc(self) -> int:
        """Number of ranks at the beginning."""

    @property
    def num_hosts(self) -> int:
        """Number of hosts at the beginning; 0: it is not known yet."""
        return 0

    @abstractmethod
    def publish(self, event: str, **fields: Any) -> None:
        """Add an event to the job's log. All observers are told of it, the one that publishes it included."""

    @abstractmethod
    def message(self, text: str) -> None:
        """Show a line on the launcher's standard error."""

    @abstractmethod
    def signal(self, worker: int, number: int) -> None:
        """Send signal `number` to a worker; ignored if the worker has ended."""

    @abstractmethod
    def start_process(self, process: SideProcess) -> int:
        """Start a process beside the ranks and return its number, which is never used again.

        Only for observers with `starts_processes`. To be called in `turn`, or later. The process may still be waiting
        for its host when this returns. `JobObserver.process_exited` tells its end, also if it could not be started.

        Raises:
            ConfigurationError: the job has no host of that index.
        """

    @abstractmethod
    def end_process(self, number: int) -> None:
        """Ask a process that `start_process` has started to end: SIGTERM, the grace period, SIGKILL. Does not wait."""

    @abstractmethod
    def values(self) -> SharedValues:
        """Return the values that the job's processes share, for observers with `starts_processes`. To be called once.

        Asking for values is quick: the launcher serves them itself.
        """


class JobObserver:
    """Watches a job in its launcher. The default of every method does nothing.

    The launcher calls the methods in its own thread, between two turns of its loop: they must be quick, and must not
    wait. An observer that raises is dropped with a warning; the job continues.

    Attributes:
        wants_output: the observer is given the lines that ranks print (`printed`).
        starts_processes: the observer may call `ObservedJob.start_process`; ranks then get UNIDIST_JOB_VALUES.
    """

    wants_output: bool = False
    starts_processes: bool = False

    def start(self, job: ObservedJob) -> None:
        """Begin to watch `job`. Called once, before anything of it is started. Start threads in `turn`, not here.

        Raises:
            ConfigurationError: the observer cannot do what was requested; the job is not started.
        """

    def resumed(self, generation: int, workers: Sequence[ObservedWorker]) -> None:
        """The launcher has taken over the job of one that has died. Called once, after `start`.

        Args:
            generation: of the last world; -1: there was none.
            workers: processes that ran when it died.
        """

    def happened(self, event: str, fields: Mapping[str, Any]) -> None:
        """An event was added to the job's log; docs/elastic.md lists the events and their fields."""

    def beat(self, worker: int, report: Mapping[str, Any]) -> None:
        """A worker has sent a heartbeat. Its report has the fields of `unidist.control.messages.StepTimeReport`."""

    def progressed(self, worker: int, report: Mapping[str, Any]) -> None:
        """A worker has written a progress report, see docs/cli.md. It is not validated and may contain anything."""

    def printed(self, seat: int, lines: Sequence[bytes]) -> None:
        """A rank has printed whole lines, on either stream. Called if `wants_output` is True.

        Args:
            seat: label of its output; the rank in a job that is not elastic.
            lines: without their newlines.
        """

    def process_exited(self, number: int, returncode: int) -> None:
        """A process that an observer has started has ended. Every observer is told; compare the number.

        Args:
            number: what `ObservedJob.start_process` has returned.
            returncode: as `subprocess` gives it: negative for a signal. 127 if it could not be started, and 255 if its
                host was lost.
        """

    def finishing(self) -> bool:
        """Return whether to wait for processes that this observer has started. Asked after the event `end`.

        The launcher asks in every turn once all ranks have ended, and goes on with its turns meanwhile. It ends the
        processes when no observer asks for more time, or a signal comes.
        """
        return False

    def turn(self) -> None:
        """Another turn of the launcher's loop, several times a second: the place to call `ObservedJob.signal`."""

    def summary(self) -> str:
        """Return a short summary of the job for the status line; "" for none."""
        return ""

    def close(self) -> None:
        """Stop watching: the job has ended, or could not be started. Called once for each observer that was started."""


@dataclass(frozen=True)
class Job:
    """A job to start.

    Args:
        command: program and arguments, the same on every rank.
        num_proc: number of ranks.
        env: variables set on every rank, on top of the launcher's own environment.
        output_dir: folder for one file per rank and stream; None writes none.
        grace_period: time between a forwarded SIGTERM and SIGKILL.
        verbose: more lines about what the launcher does.
        quiet: ranks' output only from rank 0 (errors of all).
        shows_stdout: standard output of the ranks is shown; otherwise observers and `output_dir` alone get it.
        timestamps: each line of the ranks is shown with the time.
        full_tracebacks: show tracebacks of all ranks with all frames, not only the first failure's without unidist's.
        drops_unread_output: lines that nobody reads from the launcher's output are dropped; otherwise ranks wait.
        hosts: on which ranks run, in the order in which they are filled; empty: this host.
        remote_shell: runs commands on other hosts.
        network_interfaces: each host uses the first of these that it has to communicate with the others; empty: the
            one by which the launcher reaches it.
        start_timeout: longest wait for all hosts.
        heartbeat: a host that sends nothing for longer counts as lost.
        elastic: limits of the number of ranks; None: it does not change.
        observers: of the job.
        side_processes: beside the ranks, started before them and ended after them. For launchers that have the
            capability `StartsSideProcesses`.
        outlives_ranks: a rank other than 0 that a signal has ended, or whose host is lost, does not end the job. Not
            for elastic jobs, which have rules of their own.
    """

    command: tuple[str, ...]
    num_proc: int
    env: Mapping[str, str] = field(default_factory=dict)
    output_dir: Path | None = None
    grace_period: timedelta = timedelta(seconds=10)
    verbose: bool = False
    quiet: bool = False
    shows_stdout: bool = True
    timestamps: bool = False
    full_tracebacks: bool = False
    drops_unread_output: bool = False
    hosts: tuple[Host, ...] = ()
    remote_shell: RemoteShell = field(default_factory=RemoteShell)
    network_interfaces: tuple[str, ...] = ()
    start_timeout: timedelta = timedelta(seconds=120)
    heartbeat: timedelta = timedelta(seconds=5)
    elastic: ElasticLimits | None = None
    observers: tuple[JobObserver, ...] = ()
    side_processes: tuple[SideProcess, ...] = ()
    outlives_ranks: bool = False

    @property
    def has_side_processes(self) -> bool:
        """Whether there are processes beside the ranks, or may be."""
        return bool(self.side_processes) or any(observer.starts_processes for observer in self.observers)


class KnowsHosts(ABC):
    """Capability of a launcher: finds its hosts itself, as in a scheduler's allocation. Found by isinstance.

    Used if the user names no hosts. Then the number of ranks is optional; the default is the number of all slots.
    """

    @abstractmethod
    def hosts(self) -> tuple[Host, ...]:
        """Return the hosts, with the largest number of ranks of each.

        Raises:
            ConfigurationError: they cannot be found; says why, and what to do.
        """


class RunsElasticJobs:
    """Capability of a launcher: runs elastic jobs (`Job.elastic`), whose ranks join and leave. Found by isinstance."""


class StartsSideProcesses:
    """Capability of a launcher: starts processes beside the ranks (`Job.side_processes`). Found by isinstance."""


class Launcher(ABC):
    """Starts a job, watches it, and reports how it ended."""

    @abstractmethod
    def availability(self) -> Availability:
        """Return whether this launcher can be used on this machine."""

    @abstractmethod
    def run(self, job: Job) -> int:
        """Start every rank of `job`, wait for the end, and return the exit code.

        The code is 0 if all ranks ended with 0; else that of the rank that failed first: its own exit
        code, or 128 + n when signal n killed it. Every process it started is gone when it returns, and
        also when the launcher itself is killed.

        Raises:
            ConfigurationError: the job cannot be started; nothing is left running.
        """


@dataclass(frozen=True)
class LauncherSpec:
    """A launcher, not yet imported: `path` is "module:Class" of an `unidist.launcher.Launcher`.

    `marker` is a variable whose presence says that this process runs where the launcher belongs, as in an allocation
    of a scheduler: it is then taken unless the user names hosts, or another launcher. There may be several of them.
    """

    kind: ClassVar[str] = "launcher"
    hook: ClassVar[str] = "unidist_register_launchers"

    name: str
    path: str
    summary: str
    marker: str | tuple[str, ...] = ""

    def belongs_here(self, environ: Mapping[str, str]) -> bool:
        """Return whether one of its markers is set."""
        markers = (self.marker,) if isinstance(self.marker, str) else self.marker
        return any(environ.get(name) for name in markers)

    def load(self) -> Launcher:
        """Import the class and return a new launcher."""
        launcher: Launcher = load_object(self.path, f"launcher {self.name!r}")()
        return launcher
