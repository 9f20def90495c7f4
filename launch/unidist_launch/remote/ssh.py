"""Agents on other hosts, started by ssh: the command, and what its failures mean."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence

from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist.launcher import Host, RemoteShell
from unidist_launch.remote.hosts import AgentStarter, Reasons, agent_command, agent_error, meaning_of

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

    @override
    def command(self, host: Host) -> Sequence[str]:
        """Options of the user's own ssh configuration hold where ours are silent."""
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SEC}", "-T"]
        if self._shell.port is not None:
            options += ["-p", str(self._shell.port)]
        if self._shell.identity_file is not None:
            options += ["-i", str(self._shell.identity_file.absolute())]
        return [*self._words, *options, host.name, f"exec {shlex.join(agent_command())}"]

    @override
    def explain(self, host: Host, returncode: int, text: str) -> str:
        if not agent_error(text) and returncode in (_NOT_FOUND, _NOT_EXECUTABLE):
            return (
                f"{sys.executable} does not exist there, or cannot be run; every host needs the same environment at "
                "the same path"
            )
        return meaning_of(host, self._words[0], returncode, text, _REASONS if returncode == _SSH_FAILED else ())
