"""The first message from the launcher to the agent of a host: one line of JSON on its standard input."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from unidist.control.messages import RELEASE
from unidist.errors import ConfigurationError

ORDER_VARIABLE = "UNIDIST_AGENT_ORDER"
"""Holds an order, or the path of one, for agents whose standard input nobody can reach. They take it out at once."""

_OF_THE_HOST = re.compile(
    r"_|PWD|OLDPWD|SHLVL|HOME|USER|LOGNAME|SHELL|MAIL|HOSTNAME|TMPDIR|TMP|TEMP|DISPLAY|WINDOWID|TERM|COLUMNS|LINES"
    r"|LS_COLORS|(SSH|XDG|DBUS|BASH_FUNC|TMUX|TERM)_.*|UNIDIST_(JOB_ID|SECRET_FD|PROCESS_FD|LAUNCHER_PID|AGENT_ORDER)"
    r"|UNIDIST_(ROLE|ROLE_INDEX|JOB_VALUES)"
)
"""Variables that belong to a host, a login or an outer job, and do not travel."""


@dataclass(frozen=True)
class AgentOrder:
    """An agent's orders. They hold the job's secret: they travel through a pipe or ssh only.

    Args:
        version: of unidist in the launcher, with that of its protocol.
        host: index of the agent in the job; one agent per host, but for launchers that have one per rank.
        job_id: random name of the job.
        secret: the job's secret, in hexadecimal.
        port: of the control server.
        index_variable: the agent's own variable that holds its index, where one order goes to all; then not `host`.
        indices: the index by the value of that variable; empty: its value is the index.
        tells_termination: SIGTERM to the agent is meant for the job; else it means nothing.
        address_variable: the agent's own variable whose first word is the address of the launcher, as a login or a
            scheduler sets it; of four words, as ssh writes them, the third is the address of this host.
        launcher_addresses: where else the control server may be reached.
        network_interfaces: see `Job.network_interfaces`.
        command: what each rank runs.
        env: variables that win over those of the host and of `exported`.
        exported: the launcher's own variables.
        folder: where ranks run; the same path as in the launcher.
        heartbeat_sec: the launcher is lost when nothing came from it for longer.
        connect_sec: longest time for connecting to the control server.
        orphan_sec: how long a launcher that has died may take to come back; 0: the agent and its ranks end with it.
        role: of a host without ranks, that has the processes of this role; "": it has ranks.
        role_index: counts the hosts of a role.
        num_ports: of so many ports that are free there the agent tells the launcher.
        is_elastic: ranks are started one by one, and come and go (`agent_workers`).
    """

    version: str
    host: int
    job_id: str
    secret: str
    port: int
    index_variable: str
    address_variable: str
    launcher_addresses: tuple[str, ...]
    network_interfaces: tuple[str, ...]
    command: tuple[str, ...]
    env: dict[str, str]
    exported: dict[str, str]
    folder: str
    heartbeat_sec: float
    connect_sec: float
    indices: dict[str, int] = field(default_factory=dict)
    tells_termination: bool = True
    role: str = ""
    role_index: int = 0
    num_ports: int = 0
    is_elastic: bool = False
    orphan_sec: float = 0.0

    def to_line(self) -> bytes:
        """Return the order as a line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> AgentOrder:
        """Read an order.

        Raises:
            ConfigurationError: it is from another version of unidist, or no order.
        """
        try:
            fields = json.loads(line)
            version = fields["version"]
        except (ValueError, KeyError, TypeError):
            raise ConfigurationError(
                "an agent is started by `unidist launch`, which tells it what to do; nothing readable came"
            ) from None
        if version != RELEASE:
            raise ConfigurationError(
                f"unidist {RELEASE} is installed on host {socket.gethostname()}, but the launcher is {version}; "
                "install the same on all hosts"
            )
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return cls(**{**fields, **lists})

    def of_this_agent(self, environ: Mapping[str, str]) -> AgentOrder:
        """Return the order with the index that the agent's own environment gives, where one order goes to all.

        Raises:
            ConfigurationError: the variable that should hold it does not.
        """
        if not self.index_variable:
            return self
        value = environ.get(self.index_variable, "")
        index = str(self.indices.get(value, "")) if self.indices else value
        if not index.isdigit():
            choices = ", ".join(self.indices) or "a number"
            raise ConfigurationError(
                f"{self.index_variable}={value!r} should tell this agent which it is ({choices}); what started it?"
            )
        return replace(self, host=int(index))


def exported_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of this process that the ranks on other hosts get: all but those of a host or a login."""
    env = os.environ if environ is None else environ
    return {name: value for name, value in env.items() if not _OF_THE_HOST.fullmatch(name)}
