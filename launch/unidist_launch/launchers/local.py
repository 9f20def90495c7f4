"""The local launcher: starts the ranks on this host, shows what they print, and reports how they ended."""

from __future__ import annotations

import os
import platform
import secrets
import selectors
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from typing_extensions import override

from unidist.control.server import ControlServer
from unidist.engine import Availability
from unidist.errors import ConfigurationError
from unidist.jobs import tf_config
from unidist.jobs.processes import HostShare, LocalProcesses, free_ports, watch_exit
from unidist.jobs.side_processes import SideProcesses
from unidist.launcher import Job, Launcher, SideProcess, StartsSideProcesses
from unidist.settings.environment import Settings
from unidist.topology import Topology
from unidist_launch.observation.fixed_job import FixedJobEvents
from unidist_launch.options.hosts import is_local, own_names
from unidist_launch.output.lines import Stream
from unidist_launch.output.writer import Output
from unidist_launch.remote.ending import Ending
from unidist_launch.remote.failure import RankExit
from unidist_launch.remote.fixed_ranks import FixedRanks
from unidist_launch.remote.signals import ForwardedSignals
from unidist_launch.side_processes.host import SideHost
from unidist_launch.side_processes.roster import SideReports, SideRoster
from unidist_launch.side_processes.values import LauncherValues

_EXIT_CHECK_SEC = 0.05
_LAST_OUTPUT_SEC = 1.0
_REPORTS_SEC = 0.25
_MAX_READS = 256  # 16 MiB at once: more than a pipe holds, so only a process that never stops is cut short


_LOOPBACK = "127.0.0.1"


class LocalLauncher(Launcher, StartsSideProcesses):
    """Runs every rank of a job on this host."""

    def availability(self) -> Availability:
        """Usable on Linux, whose /proc, memfd and parent-death signal it relies on."""
        if platform.system() == "Linux":
            return Availability(True, f"{len(os.sched_getaffinity(0))} cores")
        return Availability(False, f"needs Linux, this is {platform.system()}")

    def run(self, job: Job) -> int:
        """Run the job; see `Launcher.run`. To be called from the main thread, for it handles signals.

        Output files are `rank.R/stdout` and `rank.R/stderr` in `job.output_dir`, byte for byte. Rank 0
        reads this process's standard input, the others nothing.
        """
        other = next((host.name for host in job.hosts if not is_local(host)), None)
        if other is not None:
            raise ConfigurationError(
                f"host {other!r} is not this one ({', '.join(own_names())}), and the launcher `local` starts ranks on "
                "this one only. Leave --launcher out, or use --launcher ssh."
            )
        with ExitStack() as stack:
            return _Run(job, stack).run()


class _Pipe(NamedTuple):
    rank: int
    stream: Stream


class _Run(FixedRanks):
    """One run of a job: a loop over pipes, exits and signals, without threads."""

    def __init__(self, job: Job, stack: ExitStack) -> None:
        self.job = job
        self._stack = stack
        self._round = 0
        self.ending = Ending(
            job.grace_period,
            signal_ranks=self._signal_ranks,
            host_of=lambda _: socket.gethostname(),
            outlives_ranks=job.outlives_ranks,
        )
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self.output = stack.enter_context(Output.of_job(job, give_up=lambda: self.ending.is_overdue))
        self.events = FixedJobEvents(job, self.output, self._signal_rank, stack)
        self._reports_at = 0.0
        self._secret = secrets.token_bytes(32)
        self._side: SideHost | None = None
        self._server: ControlServer | None = None
        values = LauncherValues()
        variables = {}
        if job.has_side_processes:
            self._server = ControlServer(values.service, self._secret, host=_LOOPBACK)
            stack.callback(self._server.close)
            values.served_by(self._server, self._secret)
            variables["UNIDIST_JOB_VALUES"] = f"{_LOOPBACK}:{self._server.port}"
        places = tuple(Topology(rank, job.num_proc, rank, job.num_proc) for rank in range(job.num_proc))
        self._cluster = _tf_cluster(job)
        of_each = () if self._cluster is None else tuple(map(self._cluster.of_rank, range(job.num_proc)))
        share = HostShare(secrets.token_hex(8), self._secret, places, variables, of_each=of_each)
        self._processes = stack.enter_context(
            LocalProcesses(job.num_proc, env=job.env, die_with_thread=True, share=share)
        )
        reports = SideReports(
            self.output.message,
            self.events.observation.publish,
            self.events.observation.process_exited,
            self.ending.fail,
            values.keep_end,
        )
        self.roster = SideRoster(job, self, reports)
        stack.callback(self.roster.close)
        if self._server is not None:
            self._side = SideHost(
                SideProcesses(
                    job_id=share.job_id,
                    secret=self._secret,
                    env=job.env,
                    host_address=_LOOPBACK,
                    values=variables["UNIDIST_JOB_VALUES"],
                    die_with_thread=True,
                ),
                self.roster,
                heartbeat_sec=job.heartbeat.total_seconds(),
            )
            stack.callback(self._side.close)
            self._selector.register(self._side, selectors.EVENT_READ, self._side.read)
            self.events.observation.attach(self.roster, values.connect)
        self._signals = stack.enter_context(ForwardedSignals(self.ending.on_signal))

    def run(self) -> int:
        self._selector.register(self._signals.wakeup_fd, selectors.EVENT_READ, self._signals.drain)
        self._start_side_processes()
        self._start()
        if self._side is not None and self._server is not None:
            self._side.allow_threads()
            self._server.start()  # what has connected meanwhile waits in its socket
        while len(self.ending.exits) < len(self._processes.processes) and not self.ending.is_hopeless:
            self.turn()
            self.show()
        self._processes.close()  # also what ranks left in the background, which would keep the pipes open
        self._read_to_end()
        code = self.conclude()
        if code == 0:
            self._warn_of_strategy_without_effect()
        return code

    @override
    def turn(self) -> None:
        self._wait()
        self._round += 1
        self._collect_exits()
        if self._side is not None:
            self._side.collect()
            self.roster.turn()
        self._read_reports()

    # The processes beside the ranks

    def start_side(self, host: int, number: int, process: SideProcess) -> None:
        """Start a process; for the roster."""
        assert self._side is not None
        if self._cluster is not None:
            process = replace(process, env={**self._cluster.of(process), **process.env})
        self._side.start(number, process)

    def signal_side(self, host: int, number: int, chosen: Sequence[int]) -> None:
        """Send a signal to processes; for the roster."""
        assert self._side is not None
        self._side.signal(number, chosen)

    def _start_side_processes(self) -> None:
        self.roster.check_hosts(1)
        self.roster.place([0])
        if self.roster.refused:
            raise ConfigurationError("; ".join(self.roster.refused))

    # The ranks

    def _warn_of_strategy_without_effect(self) -> None:
        strategy = Settings.read({**os.environ, **self.job.env}).strategy
        if strategy and not self._processes.num_initialized:
            self.output.message(
                f"unidist: warning: --strategy {strategy} had no effect: no rank has called init(), so each of the "
                f"{self.job.num_proc} processes ran alone. Call it in the script: `import unidist.torch as ud` (or "
                "unidist.tensorflow, unidist.keras), `ud.init()`, and `ud.distribute(model, optimizer)`"
            )

    def _read_reports(self) -> None:
        now = time.monotonic()
        if now - self._reports_at >= _REPORTS_SEC:
            self._reports_at = now
            self._tell_reports()

    def _tell_reports(self) -> None:
        self.events.progressed(self._processes.new_reports())

    def _start(self) -> None:
        cores = len(os.sched_getaffinity(0))
        self.events.host_joined(0, socket.gethostname(), address="127.0.0.1", cores=cores)
        for rank in range(self.job.num_proc):
            if self.ending.has_begun:
                return  # a signal came meanwhile
            stdin = None if rank == 0 else subprocess.DEVNULL
            process = self._processes.start(
                self.job.command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for stream, file in ((Stream.STDOUT, process.stdout), (Stream.STDERR, process.stderr)):
                assert file is not None
                self._stack.callback(file.close)
                os.set_blocking(file.fileno(), False)
                self._selector.register(file, selectors.EVENT_READ, _Pipe(rank, stream))
            exit_fd = watch_exit(process)
            if exit_fd is not None:
                self._stack.callback(os.close, exit_fd)
                # Stays readable once the process has ended: it has done its work when it has woken the loop.
                self._selector.register(exit_fd, selectors.EVENT_READ, partial(self._selector.unregister, exit_fd))
            self.events.started(0, {rank: process.pid})
            if self.job.verbose:
                self.output.message(f"unidist: rank {rank} is process {process.pid}")
        self.events.complete(self.job.num_proc)

    def _wait(self) -> None:
        """Wait for the next event, and read what there is to read."""
        for key in self.ending.wait(self._selector, self.output, _EXIT_CHECK_SEC):
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
            self._selector.unregister(fd)
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
        keys = self._selector.get_map().values()
        return [key for key in keys if isinstance(key.data, _Pipe) and rank in (None, key.data.rank)]

    def _read_to_end(self) -> None:
        """Read what is left in the pipes; every process is gone, unless one has escaped to another user."""
        deadline = time.monotonic() + _LAST_OUTPUT_SEC
        while (pipes := self._pipes()) and time.monotonic() < deadline:
            read = [self._read(key.fd, key.data) for key in pipes]
            if not any(read):
                self._selector.select(_EXIT_CHECK_SEC)

    def _signal_ranks(self, number: int) -> None:
        self._processes.signal(number)

    def _signal_rank(self, rank: int, number: int) -> None:
        self._processes.signal(number, [rank])


def _tf_cluster(job: Job) -> tf_config.TfCluster | None:
    """Return what TF_CONFIG says of the job; None if it is not written."""
    if not job.has_side_processes or tf_config.is_given({**os.environ, **job.env}):
        return None
    servers = tf_config.servers_of(job.side_processes)
    addresses = [f"{_LOOPBACK}:{port}" for port in free_ports(job.num_proc + len(servers))]
    return tf_config.TfCluster(tuple(addresses[: job.num_proc]), tuple(addresses[job.num_proc :]))
