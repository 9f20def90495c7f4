"""The processes of one job on this host: started with the environment of a rank, and none left behind.

Used by the local launcher and by `unidist.run`. Three nets catch what should not outlive its parent: a
watchdog (`unidist.jobs.watchdog`), the parent-death signal, and the sweep in `close`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, Self

from unidist.errors import ConfigurationError
from unidist.horovod_imports import is_asked_for, with_path_entry
from unidist.jobs.program import open_standard_streams
from unidist.jobs.tf_config import TF_CONFIG, is_ours
from unidist.jobs.watchdog import ProcessWatchdog
from unidist.settings.environment import ROLE_VARIABLE
from unidist.settings.rank_process import PROCESS_VARIABLE, RankProcess
from unidist.topology import Topology

Stream = int | IO[bytes] | None
"""What `subprocess` takes for a standard stream: a descriptor, a file, PIPE or DEVNULL; None inherits."""

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_PR_SET_PDEATHSIG = 1
_OF_EACH_RANK = ("UNIDIST_JOB_ID", "UNIDIST_SECRET_FD", PROCESS_VARIABLE)
_OF_OTHER_PROCESSES = (ROLE_VARIABLE, "UNIDIST_ROLE_INDEX", "UNIDIST_JOB_VALUES")
"""What tells a process that it is no rank, or how to find those; of an outer job, if it is in the environment."""


@dataclass(frozen=True)
class HostShare:
    """This host's part of a job that spans several hosts.

    Args:
        job_id: random name of the job on this host; two hosts that are one machine have different ones.
        secret: the job's secret, equal on all hosts.
        places: the place of each rank of this host, in order of their local rank.
        variables: set by the launcher for every rank; the user may not set them.
        defaults: variables that the user may override (MASTER_ADDR, MASTER_PORT).
        of_each: variables of each rank, in the order of `places`; empty: none.
    """

    job_id: str
    secret: bytes
    places: tuple[Topology, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    of_each: tuple[Mapping[str, str], ...] = ()


class LocalProcesses:
    """The ranks of one job that run on this host: all, or its share. A context manager; leaving it ends them.

    Each rank is in a session of its own, so a signal from the terminal reaches only the parent.

    Args:
        num_proc: number of ranks on this host.
        env: variables for every rank, on top of this process's environment. They win over the defaults
            (MASTER_ADDR, MASTER_PORT, numbers of threads), and may not name what tells a rank its place.
        die_with_thread: also have the kernel kill each rank when the thread that started it ends, which
            holds even if the watchdog is killed too. Forks, so only for a process without other threads.
        share: this host's share of a job on several hosts; None: the job has this host alone.

    Raises:
        ConfigurationError: `num_proc` below 1, or `env` sets what only the launcher can know.
    """

    def __init__(
        self,
        num_proc: int,
        *,
        env: Mapping[str, str] | None = None,
        die_with_thread: bool = False,
        share: HostShare | None = None,
    ) -> None:
        if num_proc < 1:
            raise ConfigurationError(f"num_proc={num_proc}: a job has at least 1 process.")
        if share is None:
            share = _whole_job(num_proc)
        assert len(share.places) == num_proc
        self.num_proc = num_proc
        self.job_id = share.job_id
        self._places = share.places
        self._of_each = share.of_each or ({},) * num_proc
        self.processes: list[subprocess.Popen[bytes]] = []
        open_standard_streams()  # otherwise ranks that inherit them find descriptors of ours there
        self._before_exec = parent_death_signal() if die_with_thread else None
        self._told: list[RankProcess] = []
        self._num_initialized = 0
        self._closed = False
        user = dict(env or {})
        check_not_reserved(user, share)
        self._secret_fd = sealed_secret(share.secret)
        self._env = {
            **inherited_variables(),
            **rank_defaults(num_proc, user, share.defaults),
            **user,
            **share.variables,
            "UNIDIST_JOB_ID": self.job_id,
            "UNIDIST_SECRET_FD": str(self._secret_fd),
            "UNIDIST_LAUNCHER_PID": str(os.getpid()),
        }
        if is_asked_for(self._env):  # here, because each host has its own folder for it
            self._env["PYTHONPATH"] = with_path_entry(self._env.get("PYTHONPATH", ""))
        try:
            self._watchdog = ProcessWatchdog(self.job_id)
        except OSError:
            os.close(self._secret_fd)
            raise

    def start(
        self,
        command: Sequence[str],
        *,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Start the next rank and return its process.

        Args:
            command: program and arguments.
            stdin: standard input, as `subprocess` takes it; so are `stdout` and `stderr`.
            stdout: standard output.
            stderr: standard error.
            pass_fds: descriptors that the rank inherits, under the same numbers.

        Raises:
            ConfigurationError: the program cannot be started. Ranks started before are still there: `close`.
        """
        rank = len(self.processes)
        assert rank < self.num_proc, "all ranks are started"
        told = RankProcess()
        try:
            process = subprocess.Popen(
                list(command),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env={
                    **self._env,
                    **self._of_each[rank],
                    **rank_variables(self._places[rank]),
                    PROCESS_VARIABLE: str(told.fd),
                },
                pass_fds=(self._secret_fd, told.fd, *pass_fds),
                start_new_session=True,
                preexec_fn=self._before_exec,
            )
        except (OSError, subprocess.SubprocessError) as exc:
            told.close()
            raise ConfigurationError(f"rank {rank} of {self.num_proc}: cannot start {command[0]!r}: {exc}") from exc
        self.processes.append(process)
        self._told.append(told)
        self._watchdog.watch(process)
        return process

    @property
    def num_initialized(self) -> int:
        """The number of ranks that have called `init()` so far, or had when they were closed."""
        return self._num_initialized if self._closed else sum(told.has_announced for told in self._told)

    def new_reports(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the progress reports that ranks have written since the last call, by number on this host."""
        found = [] if self._closed else [(i, told.new_report()) for i, told in enumerate(self._told)]
        return [(i, report) for i, report in found if report is not None]

    def signal(self, number: int, ranks: Iterable[int] | None = None) -> None:
        """Send a signal to `ranks` (default: all); those that have ended are passed over.

        SIGKILL goes to a rank's process group. Any other signal goes to the rank alone, not to its children, which it
        may need to end in order. Before its `init()`, nobody knows which process of the group it is, and all get it.
        """
        for rank in range(len(self.processes)) if ranks is None else ranks:
            process = self.processes[rank]
            if process.poll() is None:  # not yet waited for, so its number cannot belong to anybody else
                pid = 0 if number == signal.SIGKILL else self._told[rank].pid(leader=process.pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if pid:
                        os.kill(pid, number)
                    else:
                        os.killpg(process.pid, number)

    def close(self) -> None:
        """Kill every process of the job that is left, wait for it, and give back all descriptors. Idempotent.

        Raises:
            RuntimeError: a process could not be killed within seconds (it hangs in the kernel); names it.
        """
        if self._closed:
            return
        self._closed = True
        self.signal(signal.SIGKILL)
        self._watchdog.close()
        for process in self.processes:
            process.wait()
        self._num_initialized = sum(told.has_announced for told in self._told)
        for told in self._told:
            told.close()
        os.close(self._secret_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def rank_variables(place: Topology) -> dict[str, str]:
    """Return the variables that tell a rank its place: ours, torchrun's and Horovod's."""
    common = {"RANK": place.rank, "LOCAL_RANK": place.local_rank}
    torchrun = {**common, "WORLD_SIZE": place.world_size, "LOCAL_WORLD_SIZE": place.local_size}
    horovod = {
        **common,
        "SIZE": place.world_size,
        "LOCAL_SIZE": place.local_size,
        "CROSS_RANK": place.node_rank,
        "CROSS_SIZE": place.num_nodes,
    }
    values = {
        **{f"UNIDIST_{name}": value for name, value in torchrun.items()},
        "UNIDIST_NODE_RANK": place.node_rank,
        "UNIDIST_NUM_NODES": place.num_nodes,
        **torchrun,
        **{f"HOROVOD_{name}": value for name, value in horovod.items()},
        "HOROVOD_HOSTNAME": socket.gethostname(),  # scripts read it; ranks are started on their own host
    }
    return {name: str(value) for name, value in values.items()}


def watch_exit(process: subprocess.Popen[bytes]) -> int | None:
    """Return a descriptor that becomes readable when `process` ends; the caller closes it.

    None on kernels and sandboxes without pidfd: there the caller learns of the end from `poll()` alone.
    """
    try:
        return os.pidfd_open(process.pid)
    except (OSError, AttributeError):
        return None


def describe_exit(returncode: int) -> str:
    """Say how a process ended: "exit code 7", "killed by signal 9 (SIGKILL)"."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = f" ({signal.Signals(-returncode).name})"
    except ValueError:
        name = ""
    return f"killed by signal {-returncode}{name}"


def _whole_job(num_proc: int) -> HostShare:
    """Return the share of a job that has one host."""
    places = tuple(Topology(rank, num_proc, rank, num_proc) for rank in range(num_proc))
    return HostShare(secrets.token_hex(8), secrets.token_bytes(32), places)


def inherited_variables() -> dict[str, str]:
    """Return the variables of this process that its job's processes get: those of an outer job are left out."""
    left_out = {*_OF_OTHER_PROCESSES, *((TF_CONFIG,) if is_ours(os.environ) else ())}
    return {
        name: value
        for name, value in os.environ.items()
        # Inside a job of torchrun, its variables would send the script's own torch.distributed to that job's store.
        if not name.startswith("TORCHELASTIC_") and name not in left_out
    }


def check_not_reserved(env: Mapping[str, str], share: HostShare) -> None:
    """Check variables that a user gives to every rank.

    Raises:
        ConfigurationError: one of them is set by what starts the ranks, and tells a rank its place.
    """
    reserved = sorted(
        env.keys() & {*rank_variables(share.places[0]), *share.variables, *_OF_EACH_RANK, *_OF_OTHER_PROCESSES}
    )
    if reserved:
        raise ConfigurationError(f"{', '.join(reserved)}: set by the launcher for each rank, and cannot be given.")


def rank_defaults(num_proc: int, user: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return default environment variables of a rank that has a host together with `num_proc` - 1 others."""
    defaults = {"MASTER_ADDR": "127.0.0.1", **given}
    if "MASTER_PORT" not in {**defaults, **user}:  # for the script's own torch.distributed; unidist uses no port
        defaults["MASTER_PORT"] = str(free_port())
    # As many threads as cores on every rank would make them compete; torchrun says 1, which leaves cores idle.
    # TensorFlow's own threads do not heed OpenMP's number; those that run blocking input pipelines are left alone.
    num_threads = str(max(1, len(os.sched_getaffinity(0)) // num_proc))
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
        if name not in {**os.environ, **user}:
            defaults[name] = num_threads
    return defaults


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port of one of this host's addresses that is free at the moment."""
    return free_ports(1, address)[0]


def free_ports(number: int, address: str = "127.0.0.1") -> list[int]:
    """Return different ports of one of this host's addresses that are free at the moment."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket(family)) for _ in range(number)]
        for probe in probes:
            probe.bind((address, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def sealed_secret(secret: bytes) -> int:
    """Return a read-only descriptor of a secret, which so is in no command line, file or environment variable."""
    descriptor = os.memfd_create("unidist-secret", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, secret)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def parent_death_signal() -> Callable[[], None]:
    """Return a function for the forked child that has the kernel kill it when its parent dies."""
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return ask_kernel
