"""Processes of a job beside its ranks on this host: a parameter server, an evaluator. None is left behind.

As for ranks, a watchdog and, if asked for, the parent-death signal end what should not outlive its parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from unidist.errors import ConfigurationError
from unidist.horovod_imports import is_asked_for, with_path_entry
from unidist.jobs.liveness import Beats, StopWatch
from unidist.jobs.processes import inherited_variables, parent_death_signal, sealed_secret
from unidist.jobs.watchdog import ProcessWatchdog
from unidist.launcher import SideProcess
from unidist.settings.environment import ROLE_VARIABLE
from unidist.settings.launcher_variables import CONTRACTS
from unidist.settings.rank_process import PROCESS_VARIABLE

_OF_RANKS = frozenset(
    {
        *(
            name
            for each in CONTRACTS
            for name in (
                *(each.marker, each.rank, each.world_size),
                *(each.local_rank, each.local_size, each.node_rank, each.num_nodes),
            )
        ),
        PROCESS_VARIABLE,
        "UNIDIST_CONTROL_ADDRESS",
        "UNIDIST_GENERATION",
        "UNIDIST_WORKER",
    }
)
"""Variables by which a process would take itself for a rank."""

_OF_TRAINING = {
    "UNIDIST_STRATEGY": "",
    "UNIDIST_ENGINE": "",
    "UNIDIST_TIMELINE": "",
    "HOROVOD_TIMELINE": "",
    "UNIDIST_AUTOTUNE": "",
    "HOROVOD_AUTOTUNE": "",
}
"""Settings of the ranks' training that have no place in a process that trains nothing, or writes the same files."""


@dataclass(frozen=True)
class _Started:
    process: subprocess.Popen[bytes]
    watchdog: ProcessWatchdog
    beats: Beats
    stops: StopWatch


class SideProcesses:
    """The processes of one job beside its ranks that run on this host, by number. Leaving it as a context ends them.

    Each is in a session of its own, and has a name of its own for sweeps: what it has started ends with it, and no
    other process of the job does.

    Args:
        job_id: of the job on this host.
        secret: the job's secret.
        env: variables of the job, on top of this process's environment.
        host_address: at which other hosts reach this one.
        values: HOST:PORT of the values that the job's processes share, as this host reaches them.
        die_with_thread: as for `LocalProcesses`. May be set to False later, before other threads are started.
    """

    def __init__(
        self,
        *,
        job_id: str,
        secret: bytes,
        env: Mapping[str, str],
        host_address: str,
        values: str,
        die_with_thread: bool = False,
    ) -> None:
        self.die_with_thread = die_with_thread
        self._job_id = job_id
        self._secret_fd = sealed_secret(secret)
        self._started: dict[int, _Started] = {}
        self._closed = False
        given = {name: value for name, value in {**inherited_variables(), **env}.items() if name not in _OF_RANKS}
        self._env = {**given, **_OF_TRAINING}
        if is_asked_for(self._env):  # here, because each host has its own folder for it
            self._env["PYTHONPATH"] = with_path_entry(self._env.get("PYTHONPATH", ""))
        self._own = {
            "UNIDIST_SECRET_FD": str(self._secret_fd),
            "UNIDIST_LAUNCHER_PID": str(os.getpid()),
            "UNIDIST_HOST_ADDRESS": host_address,
            "UNIDIST_JOB_VALUES": values,
        }

    def start(self, number: int, wanted: SideProcess) -> subprocess.Popen[bytes]:
        """Start a process; it reads nothing, and its output and errors come through one pipe that does not block.

        Args:
            number: names it in other calls; never used before.
            wanted: the process.

        Raises:
            ConfigurationError: it cannot be started; says why.
        """
        job_id = f"{self._job_id}/{wanted.role}.{number}"
        own = {ROLE_VARIABLE: wanted.role, "UNIDIST_ROLE_INDEX": str(wanted.index), "UNIDIST_JOB_ID": job_id}
        try:
            beats = Beats()
        except OSError as exc:
            raise ConfigurationError(f"{wanted.name}: cannot be watched: {exc}") from exc
        try:
            return self._start(number, wanted, {**own, **beats.environ}, job_id, beats)
        except BaseException:
            beats.close()
            raise
        finally:
            beats.started()

    def _start(
        self, number: int, wanted: SideProcess, own: Mapping[str, str], job_id: str, beats: Beats
    ) -> subprocess.Popen[bytes]:
        try:
            watchdog = ProcessWatchdog(job_id)
        except OSError as exc:
            raise ConfigurationError(f"{wanted.name}: cannot start the program that watches it: {exc}") from exc
        try:
            process = subprocess.Popen(
                list(wanted.command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**self._env, **wanted.env, **self._own, **own},
                pass_fds=(self._secret_fd, beats.process_fd),
                start_new_session=True,
                preexec_fn=parent_death_signal() if self.die_with_thread else None,
            )
        except (OSError, subprocess.SubprocessError) as exc:
            watchdog.close()
            raise ConfigurationError(f"{wanted.name}: cannot start {wanted.command[0]!r}: {exc}") from exc
        watchdog.watch(process)
        self._started[number] = _Started(process, watchdog, beats, StopWatch(process.pid))
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def silences(self, now: float, standstill: float) -> dict[int, float]:
        """Return for how many seconds nothing was heard of each process, or it was stopped before its first beat.

        Arguments as of `Beats.silence`.
        """
        return {
            number: max(started.beats.silence(now, standstill), started.stops.seconds(now))
            for number, started in self._started.items()
        }

    def signal(self, number: int, chosen: Iterable[int]) -> None:
        """Send signal `number` to the process groups of these processes; those that have ended are passed over."""
        for each in chosen:
            started = self._started.get(each)
            if started is not None and started.process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(started.process.pid, number)

    def end(self, number: int) -> int:
        """End what is left of a process and of what it has started, and return its return code. It is forgotten.

        Raises:
            RuntimeError: a process could not be killed within seconds (it hangs in the kernel); names it.
        """
        started = self._started.pop(number)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if started.process.poll() is None:
                os.killpg(started.process.pid, signal.SIGKILL)
        started.watchdog.close()
        started.beats.close()
        return started.process.wait()

    def close(self) -> None:
        """End all. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.signal(signal.SIGKILL, list(self._started))
        try:
            for number in list(self._started):
                output = self._started[number].process.stdout
                self.end(number)
                if output is not None:
                    output.close()
        finally:
            os.close(self._secret_fd)


__all__ = ["SideProcesses"]
