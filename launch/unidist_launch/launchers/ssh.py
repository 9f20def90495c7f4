"""The ssh launcher: one ssh connection to each host, an agent at its end."""

from __future__ import annotations

import platform
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from unidist.engine import Availability
from unidist.errors import ConfigurationError
from unidist.launcher import Host, Job, Launcher, RemoteShell
from unidist_launch.options import hosts as host_list
from unidist_launch.remote.hosts import AgentStarter, LocalAgents, Reasons, agent_command, agent_error, meaning_of
from unidist_launch.remote.run import RemoteRun

_CONNECT_SEC = 10
_SSH_FAILED = 255
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126

_REASONS: Reasons = (
    (r"Could not resolve hostname", "no host of this name is known here; check -H, /etc/hosts and ~/.ssh/config"),
    (r"Connection refused", "no ssh server listens there; is sshd running, and on this port (--ssh-port)?"),
    (r"timed out|Operation timed out", "it does not answer; is it up, and reachable from here?"),
    (r"No route to host|Network is unreachable", "there is no way to it in the network from here"),
    (
        r"Permission denied",
        "ssh could not log in without a password; make `ssh HOST true` work first (--ssh-identity-file, ssh-agent)",
    ),
    (r"Host key verification failed", "its host key is not known here; connect once by hand: `ssh HOST`"),
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key is not the one that is known here; see ssh's message"),
    (r"[Ii]dentity file .* not accessible", "the identity file cannot be read"),
)
"""What ssh writes, and what it means for the user; ssh itself knows one exit code for all of it."""


class SshLauncher(Launcher):
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
            return RemoteRun(job, hosts, lambda host: here if host_list.is_local(host) else ssh, stack).run()


class SshAgents(AgentStarter):
    """Starts agents by ssh.

    Args:
        shell: how ssh is called.

    Raises:
        ConfigurationError: there is no such command, or no such identity file.
    """

    address_variable = "SSH_CONNECTION"

    def __init__(self, shell: RemoteShell) -> None:
        self._shell = shell
        try:
            words = shlex.split(shell.command)
        except ValueError as exc:
            raise ConfigurationError(f"--ssh-command {shell.command!r} cannot be read: {exc}") from exc
        if not words or shutil.which(words[0]) is None:
            raise ConfigurationError(
                f"--ssh-command {shell.command!r}: there is no such program here; install an ssh client."
            )
        if shell.identity_file is not None and not shell.identity_file.is_file():
            raise ConfigurationError(f"--ssh-identity-file {str(shell.identity_file)!r} does not exist.")
        self._words = words

    def command(self, host: Host) -> Sequence[str]:
        """See `AgentStarter.command`. Options of the user's own ssh configuration hold where ours are silent."""
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SEC}", "-T"]
        if self._shell.port is not None:
            options += ["-p", str(self._shell.port)]
        if self._shell.identity_file is not None:
            options += ["-i", str(self._shell.identity_file.absolute())]
        return [*self._words, *options, host.name, f"exec {shlex.join(agent_command())}"]

    def explain(self, host: Host, returncode: int, text: str) -> str:
        """See `AgentStarter.explain`."""
        if not agent_error(text) and returncode in (_NOT_FOUND, _NOT_EXECUTABLE):
            return (
                f"{sys.executable} does not exist there, or cannot be run; every host needs the same environment at "
                "the same path"
            )
        return meaning_of(host, self._words[0], returncode, text, _REASONS if returncode == _SSH_FAILED else ())
