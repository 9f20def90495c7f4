"""Ranks that are child processes of the launcher: what they print is shown and kept, and how they end is reported.

`run_processes` is what is left of a launcher of such ranks once it can start one.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import IO, Any, NamedTuple, Protocol

from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist.jobs.processes import watch_exit
from unidist.launcher import Job, SideProcess
from unidist_launch.observation.fixed_job import FixedJobEvents
from unidist_launch.output.lines import Stream
from unidist_launch.output.writer import Output
from unidist_launch.remote.ending import Ending
from unidist_launch.remote.failure import RankExit
from unidist_launch.remote.fixed_ranks import FixedRanks
from unidist_launch.remote.signals import ForwardedSignals
from unidist_launch.side_processes.roster import SideReports, SideRoster

__all__ = ["ProcessRun", "RankProcesses", "run_processes"]

_EXIT_CHECK_SEC = 0.05
_LAST_OUTPUT_SEC = 1.0
_REPORTS_SEC = 0.25
_MAX_READS = 256  # 16 MiB at once: more than a pipe holds, so only a process that never stops is cut short


class RankProcesses(Protocol):
    """The processes of a job's ranks. `unidist.jobs.LocalProcesses` is one such list, for ranks on this host."""

    @property
    def processes(self) -> Sequence[subprocess.Popen[bytes]]:
        """Those that were started, by rank."""

    def start(
        self, command: Sequence[str], *, stdin: int | IO[bytes] | None, stdout: int, stderr: int
    ) -> subprocess.Popen[bytes]:
        """Start the next rank, and return its process.

        Args:
            command: program and arguments.
            stdin: for rank 0 None, this process's own; for the others DEVNULL.
            stdout: PIPE.
            stderr: PIPE.

        Raises:
            ConfigurationError: it cannot be started.
        """

    def signal(self, number: int, ranks: Iterable[int] | None = None) -> None:
        """Send a signal to `ranks`, by default all; called in a signal handler, too. Ended ones are passed over."""

    def new_reports(self) -> Sequence[tuple[int, Mapping[str, Any]]]:
        """Return the progress reports that came since the last call, by rank; () if there are none."""

    def close(self) -> None:
        """Kill what is left, and wait for its end. Idempotent."""


def run_processes(job: Job, processes: RankProcesses, command: Sequence[str] = ()) -> int:
    """Start every rank of a job as a process, see it to its end, and return the exit code; see `Launcher.run`.

    Lines are shown with their rank, kept in `job.output_dir`, and told to observers. SIGINT, SIGTERM and SIGHUP go to
    the ranks, and SIGKILL after `job.grace_period`. When a rank fails the others are ended, and the one to blame is
    reported. Rank 0 reads this process's standard input. To be called from the main thread, for it handles signals.

    Args:
        job: the job.
        processes: starts and signals the ranks; closed at the end.
        command: what a rank runs; default: `job.command`.

    Raises:
        ConfigurationError: the job cannot be started; nothing is left running.
    """
    with ExitStack() as stack:
        stack.callback(processes.close)
        return ProcessRun(job, lambda: processes, stack, command=command).run()


class _Pipe(NamedTuple):
    rank: int
    stream: Stream


def _keep_nothing(name: str, reason: str) -> None:
    """Nobody waits for values of processes beside the ranks."""


class ProcessRun(FixedRanks):
    """One run of a job: a loop over pipes, exits and signals, without threads. A subclass may add what it waits for.

    Args:
        job: the job.
        make_processes: returns the `processes` of `run_processes`, when it is known that output can be kept.
        stack: takes what has to be given back.
        command: see `run_processes`.
        keep_end: see `SideReports`.

    Attributes:
        selector: of the loop; the data of a key is called when its file is readable.
    """

    def __init__(
        self,
        job: Job,
        make_processes: Callable[[], RankProcesses],
        stack: ExitStack,
        *,
        command: Sequence[str] = (),
        keep_end: Callable[[str, str], None] = _keep_nothing,
    ) -> None:
        self.job = job
        self._command = tuple(command) or job.command
        self._stack = stack
        self._round = 0
        self._reports_at = 0.0
        self.ending = Ending(
            job.grace_period,
            signal_ranks=self._signal_ranks,
            host_of=lambda _: socket.gethostname(),
            outlives_ranks=job.outlives_ranks,
        )
        self.selector = stack.enter_context(selectors.DefaultSelector())
        self.output = stack.enter_context(Output.of_job(job, give_up=lambda: self.ending.is_overdue))
        self.events = FixedJobEvents(job, self.output, self._signal_rank, stack)
        self._processes = make_processes()
        stack.callback(self._processes.close)  # before the output: what they print till then is still taken
        self.roster = SideRoster(
            job,
            self,
            SideReports(
                self.output.message,
                self.events.observation.publish,
                self.events.observation.process_exited,
                self.ending.fail,
                keep_end,
            ),
        )
        stack.callback(self.roster.close)
        self._signals = stack.enter_context(ForwardedSignals(self.ending.on_signal))

    def run(self) -> int:
        """Run the job to its end; returns the exit code."""
        self.selector.register(self._signals.wakeup_fd, selectors.EVENT_READ, self._signals.drain)
        self.start()
        while len(self.ending.exits) < len(self._processes.processes) and not self.ending.is_hopeless:
            self.turn()
            self.show()
        self._processes.close()  # also what ranks left in the background, which would keep the pipes open
        self._read_to_end()
        return self.conclude()

    @override
    def turn(self) -> None:
        self._wait()
        self._round += 1
        self._collect_exits()
        self._read_reports()

    def start_side(self, host: int, number: int, process: SideProcess) -> None:
        """Start a process beside the ranks; for the roster."""
        raise ConfigurationError(f"{process.name}: this launcher starts ranks alone")

    def signal_side(self, host: int, number: int, chosen: Sequence[int]) -> None:
        """Send a signal to processes beside the ranks; for the roster. There are none."""

    def _read_reports(self) -> None:
        now = time.monotonic()
        if now - self._reports_at >= _REPORTS_SEC:
            self._reports_at = now
            self._tell_reports()

    def _tell_reports(self) -> None:
        self.events.progressed(self._processes.new_reports())

    def start(self) -> None:
        """Start the ranks."""
        cores = len(os.sched_getaffinity(0))
        self.events.host_joined(0, socket.gethostname(), address="127.0.0.1", cores=cores)
        for rank in range(self.job.num_proc):
            if self.ending.has_begun:
                return  # a signal came meanwhile
            stdin = None if rank == 0 else subprocess.DEVNULL
            process = self._processes.start(self._command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for stream, file in ((Stream.STDOUT, process.stdout), (Stream.STDERR, process.stderr)):
                assert file is not None
                self._stack.callback(file.close)
                os.set_blocking(file.fileno(), False)
                self.selector.register(file, selectors.EVENT_READ, _Pipe(rank, stream))
            exit_fd = watch_exit(process)
            if exit_fd is not None:
                self._stack.callback(os.close, exit_fd)
                # Stays readable once the process has ended: it has done its work when it has woken the loop.
                self.selector.register(exit_fd, selectors.EVENT_READ, partial(self.selector.unregister, exit_fd))
            self.events.started(0, {rank: process.pid})
            if self.job.verbose:
                self.output.message(f"unidist: rank {rank} is process {process.pid}")
        self.events.complete(self.job.num_proc)

    def _wait(self) -> None:
        """Wait for the next event, and read what there is to read."""
        for key in self.ending.wait(self.selector, self.output, _EXIT_CHECK_SEC):
            if isinstance(key.data, _Pipe):
                self._read(key.fd, key.data)
            else:
                key.data()

    def _read(self, fd: int, pipe: _Pipe) -> bool:
        """Read once from a rank's pipe; False when there is nothing more at the moment."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self.selector.unregister(fd)
        self.output.feed(pipe.rank, pipe.stream, data)
        return bool(data)

    def _collect_exits(self) -> None:
        seen = {end.rank for end in self.ending.exits}
        for rank, process in enumerate(self._processes.processes):
            if rank in seen or process.poll() is None:
                continue
            for key in self._pipes(rank):
                for _ in range(_MAX_READS):
                    if not self._read(key.fd, key.data):
                        break
            self._tell_reports()  # its last one, before observers hear of its end
            tail = self.output.stderr_tail(rank)
            self.note_exit(
                RankExit(rank, process.pid, process.returncode, self._round, tail, signalled=self.ending.has_begun)
            )

    def _pipes(self, rank: int | None = None) -> list[selectors.SelectorKey]:
        keys = self.selector.get_map().values()
        return [key for key in keys if isinstance(key.data, _Pipe) and rank in (None, key.data.rank)]

    def _read_to_end(self) -> None:
        """Read what is left in the pipes; every process is gone, unless one has escaped to another user."""
        deadline = time.monotonic() + _LAST_OUTPUT_SEC
        while (pipes := self._pipes()) and time.monotonic() < deadline:
            read = [self._read(key.fd, key.data) for key in pipes]
            if not any(read):
                self.selector.select(_EXIT_CHECK_SEC)

    def _signal_ranks(self, number: int, ranks: Iterable[int] | None = None) -> None:
        self._processes.signal(number, ranks)

    def _signal_rank(self, rank: int, number: int) -> None:
        self._processes.signal(number, [rank])
