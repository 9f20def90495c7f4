"""The local launcher: starts the ranks on this host, and the processes beside them."""

from __future__ import annotations

import os
import platform
import secrets
import selectors
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from typing_extensions import override

from unidist.control.server import ControlServer
from unidist.engine import Availability
from unidist.errors import ConfigurationError
from unidist.jobs import tf_config
from unidist.jobs.processes import HostShare, LocalProcesses, free_ports
from unidist.jobs.side_processes import SideProcesses
from unidist.launcher import Job, Launcher, SideProcess, StartsSideProcesses
from unidist.settings.environment import Settings
from unidist.topology import Topology
from unidist_launch.launchers.rank_processes import ProcessRun
from unidist_launch.options.hosts import check_local
from unidist_launch.side_processes.host import SideHost
from unidist_launch.side_processes.values import LauncherValues

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
        check_local(job.hosts, "local")
        with ExitStack() as stack:
            return _Run(job, stack).run()


class _Run(ProcessRun):
    """One run of a job, whose ranks may have processes beside them."""

    _ranks: LocalProcesses

    def __init__(self, job: Job, stack: ExitStack) -> None:
        secret = secrets.token_bytes(32)
        values = LauncherValues()
        variables = {}
        self._server: ControlServer | None = None
        if job.has_side_processes:
            self._server = ControlServer(values.service, secret, host=_LOOPBACK)
            stack.callback(self._server.close)
            values.served_by(self._server, secret)
            variables["UNIDIST_JOB_VALUES"] = f"{_LOOPBACK}:{self._server.port}"
        places = tuple(Topology(rank, job.num_proc, rank, job.num_proc) for rank in range(job.num_proc))
        self._cluster = _tf_cluster(job)
        of_each = () if self._cluster is None else tuple(map(self._cluster.of_rank, range(job.num_proc)))
        share = HostShare(secrets.token_hex(8), secret, places, variables, of_each=of_each)

        def make_ranks() -> LocalProcesses:
            self._ranks = LocalProcesses(job.num_proc, env=job.env, die_with_thread=True, share=share)
            return self._ranks

        super().__init__(job, make_ranks, stack, keep_end=values.keep_end)
        self._side: SideHost | None = None
        if self._server is not None:
            self._side = SideHost(
                SideProcesses(
                    job_id=share.job_id,
                    secret=secret,
                    env=job.env,
                    host_address=_LOOPBACK,
                    values=variables["UNIDIST_JOB_VALUES"],
                    die_with_thread=True,
                ),
                self.roster,
                heartbeat_sec=job.heartbeat.total_seconds(),
            )
            stack.callback(self._side.close)
            self.selector.register(self._side, selectors.EVENT_READ, self._side.read)
            self.events.observation.attach(self.roster, values.connect)

    @override
    def run(self) -> int:
        code = super().run()
        if code == 0:
            self._warn_of_strategy_without_effect()
        return code

    @override
    def start(self) -> None:
        self.roster.check_hosts(1)
        self.roster.place([0])
        if self.roster.refused:
            raise ConfigurationError("; ".join(self.roster.refused))
        super().start()
        if self._side is not None and self._server is not None:
            self._side.allow_threads()
            self._server.start()  # what has connected meanwhile waits in its socket

    @override
    def turn(self) -> None:
        super().turn()
        if self._side is not None:
            self._side.collect()
            self.roster.turn()

    @override
    def start_side(self, host: int, number: int, process: SideProcess) -> None:
        assert self._side is not None
        if self._cluster is not None:
            process = replace(process, env={**self._cluster.of(process), **process.env})
        self._side.start(number, process)

    @override
    def signal_side(self, host: int, number: int, chosen: Sequence[int]) -> None:
        assert self._side is not None
        self._side.signal(number, chosen)

    def _warn_of_strategy_without_effect(self) -> None:
        strategy = Settings.read({**os.environ, **self.job.env}).strategy
        if strategy and not self._ranks.num_initialized:
            self.output.message(
                f"unidist: warning: --strategy {strategy} had no effect: no rank has called init(), so each of the "
                f"{self.job.num_proc} processes ran alone. Call it in the script: `import unidist.torch as ud` (or "
                "unidist.tensorflow, unidist.keras), `ud.init()`, and `ud.distribute(model, optimizer)`"
            )


def _tf_cluster(job: Job) -> tf_config.TfCluster | None:
    """Return what TF_CONFIG says of the job; None if it is not written."""
    if not job.has_side_processes or tf_config.is_given({**os.environ, **job.env}):
        return None
    servers = tf_config.servers_of(job.side_processes)
    addresses = [f"{_LOOPBACK}:{port}" for port in free_ports(job.num_proc + len(servers))]
    return tf_config.TfCluster(tuple(addresses[: job.num_proc]), tuple(addresses[job.num_proc :]))
