"""The ssh launcher: one ssh connection to each host, an agent at its end."""

from __future__ import annotations

import platform
import shutil
from contextlib import ExitStack

from unidist.engine import Availability
from unidist.errors import ConfigurationError
from unidist.launcher import Job, Launcher, StartsSideProcesses
from unidist_launch.options import hosts as host_list
from unidist_launch.remote.hosts import LocalAgents
from unidist_launch.remote.run import RemoteRun
from unidist_launch.remote.ssh import SshAgents


class SshLauncher(Launcher, StartsSideProcesses):
    """Runs the ranks of a job on several hosts."""

    def availability(self) -> Availability:
        """Usable on Linux with an ssh client; a job may name another command for it."""
        if platform.system() != "Linux":
            return Availability(False, f"needs Linux, this is {platform.system()}")
        return Availability(True, shutil.which("ssh") or "no ssh on the PATH; --ssh-command names one")

    def run(self, job: Job) -> int:
        """Run the job; see `Launcher.run`. To be called from the main thread, for it handles signals.

        Ranks read nothing on standard input. Hosts that are this one get an agent without ssh.
        """
        if not job.hosts:
            raise ConfigurationError(
                "the ssh launcher needs to know the hosts: -H HOST:SLOTS,HOST:SLOTS or --hostfile."
            )
        hosts = host_list.used(job.hosts, job.num_proc)
        ssh, here = SshAgents(job.remote_shell), LocalAgents()
        with ExitStack() as stack:
            starters = [here if host_list.is_local(host) else ssh for host in hosts]
            return RemoteRun(job, hosts, starters, stack).run()
