"""The agents of a job's hosts: started, awaited, and gone at the end."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from typing_extensions import override

from unidist.control.messages import RELEASE
from unidist.errors import ConfigurationError
from unidist.jobs.network import interface_address
from unidist.jobs.processes import parent_death_signal
from unidist.launcher import Host, Job
from unidist_launch.agent.agent import ERROR_MARK
from unidist_launch.agent.order import AgentOrder, exported_variables

_LEAVE_SEC = 3.0
_MAX_TEXT_BYTES = 64 << 10


class AgentStarter(ABC):
    """Starts the agent of a host or, by one command, those of all hosts that share this starter."""

    index_variable: str = ""
    """The agents' variable that holds their number, if one command starts all of them; "": a command for each host."""

    indices: Mapping[str, int] = MappingProxyType({})
    """The agents' numbers by the values of that variable; empty: its value is the number."""

    comes_by_itself: bool = False
    """Somebody else starts the agents (a cluster, in containers), with orders of their own: they are only awaited."""

    address_variable: str = ""
    """The agents' variable whose first word is the address of the launcher; see `AgentOrder`."""

    addresses: tuple[str, ...] = ()
    """Where agents reach the launcher, if the starter knows."""

    tells_termination: bool = True
    """Whether SIGTERM to an agent is meant for the job, as from a scheduler."""

    exports: bool = True
    """Whether the launcher's environment has to travel with the order: the command does not carry it by itself."""

    @abstractmethod
    def command(self, host: Host) -> Sequence[str]:
        """Return the command that runs the agent on `host` and carries standard input and error to and from it.

        With an `index_variable` it is asked for the first host only.
        """

    def summon(self, host: Host, order: bytes) -> None:  # noqa: B027 - a default
        """Request the agent of `host`, with this order, where agents start by themselves; must not wait.

        The default leaves it to whoever has started this process as well. Of elastic jobs only.
        """

    def problem(self, host: Host) -> str:
        """Say why an agent that was summoned and has not come will not come; "" if it still may. Must not wait."""
        return ""

    def dismiss(self, host: Host, *, patient: bool) -> None:  # noqa: B027 - a default
        """Make sure that an agent that was summoned is gone; `patient`: it was told to end, and may take seconds."""

    def environment(self) -> dict[str, str]:
        """Return the environment of the command (default: the launcher's)."""
        return dict(os.environ)

    def order_channel(self, order: bytes) -> bytes:
        """Return what is written to the command's standard input; the default is the order itself.

        A starter whose command does not carry standard input to every agent sends it another way, from here.
        """
        return order

    @abstractmethod
    def explain(self, host: Host, returncode: int, text: str) -> str:
        """Say why an agent did not come, in words that tell the user what to do.

        Args:
            host: where it should have come from.
            returncode: of the command.
            text: what the command wrote.
        """


class LocalAgents(AgentStarter):
    """The agent of this host needs nobody in between."""

    addresses = ("127.0.0.1",)

    @override
    def command(self, host: Host) -> Sequence[str]:
        return agent_command()

    @override
    def explain(self, host: Host, returncode: int, text: str) -> str:
        return agent_error(text) or f"its agent ended with exit code {returncode}: {last_line(text)}"


@dataclass(eq=False)
class AgentProcess:
    """A host, the process here that leads to its agent, and what is known of it.

    Args:
        index: of the host in the job.
        host: the host.
        starter: how its agent is started.
        leader: the one whose command starts this agent too; None: it has its own.
    """

    index: int
    host: Host
    starter: AgentStarter
    leader: AgentProcess | None = None
    process: subprocess.Popen[bytes] | None = None
    text: bytearray = field(default_factory=bytearray)

    def start(self, order: AgentOrder) -> None:
        """Start the agent and give it its orders.

        Raises:
            OSError: the command cannot be started.
        """
        if self.starter.comes_by_itself:
            self.starter.summon(self.host, order.to_line())
            return
        if self.leader is not None:
            self.process, self.text, self._order = self.leader.process, self.leader.text, b""
            return
        self._order = self.starter.order_channel(order.to_line())
        self.process = subprocess.Popen(
            [*self.starter.command(self.host)],
            env=self.starter.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the terminal's signals are the launcher's
            # Where another launcher may come and take over, what this one has started may outlive it.
            preexec_fn=None if order.orphan_sec else parent_death_signal(),
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        os.set_blocking(self.process.stdin.fileno(), False)

    def watch(self, selector: selectors.BaseSelector, show: Callable[[bytes], None] = lambda data: None) -> None:
        """Have a loop, which calls the data of what is ready, write the orders and read what the command writes.

        Args:
            selector: of the loop.
            show: called with what the command has written: nothing unless there is a problem, or a banner.
        """
        if self.leader is not None or self.process is None:
            return
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        selector.register(self.process.stdin, selectors.EVENT_WRITE, partial(self._write, selector))
        selector.register(self.process.stdout, selectors.EVENT_READ, partial(self._show, selector, show))

    def unwatch(self, selector: selectors.BaseSelector) -> None:
        """Take back `watch`. Idempotent."""
        for pipe in () if self.process is None else (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed and pipe.fileno() in selector.get_map():
                selector.unregister(pipe)

    def _write(self, selector: selectors.BaseSelector) -> None:
        """Write more of the orders, as far as the pipe takes them."""
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self._order = self._order[os.write(self.process.stdin.fileno(), self._order) :]
        except BlockingIOError:
            return
        except OSError:
            self._order = b""  # it has ended; its exit code tells
        if not self._order:
            selector.unregister(self.process.stdin)

    def _show(self, selector: selectors.BaseSelector, show: Callable[[bytes], None]) -> None:
        data = self.read()
        if data is not None:
            show(data)
            return
        assert self.process is not None
        assert self.process.stdout is not None
        selector.unregister(self.process.stdout)

    def read(self) -> bytes | None:
        """Return what the command wrote since the last call, None at its end; the last part is kept in `text`."""
        assert self.process is not None
        assert self.process.stdout is not None
        try:
            data = os.read(self.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return b""
        self.text += data
        del self.text[:-_MAX_TEXT_BYTES]
        return data or None

    def why(self) -> str:
        """Say why the agent did not come."""
        assert self.process is not None
        text = self.text.decode(errors="replace")
        return self.starter.explain(self.host, self.process.returncode, text)


def end_all(agents: Sequence[AgentProcess], *, patient_with: Sequence[AgentProcess]) -> None:
    """End the commands and close their pipes; those in `patient_with` have seconds to end with their agents.

    The others are asked by SIGTERM first: srun and mpirun end what they started then, as SIGKILL would not let them.
    """
    deadline = time.monotonic() + _LEAVE_SEC
    patient = [agent.process for agent in patient_with]
    started = [agent.process for agent in agents if agent.leader is None and agent.process is not None]
    for process in started:
        if process not in patient:
            process.terminate()
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def order_of(
    job: Job, starter: AgentStarter, *, index: int, job_id: str, secret: bytes, port: int, env: Mapping[str, str]
) -> AgentOrder:
    """Return the orders of an agent of a job.

    Args:
        job: the job.
        starter: how the agent is started.
        index: of the agent.
        job_id: random name of the job.
        secret: the job's.
        port: of the control server.
        env: the variables of ranks.
    """
    return AgentOrder(
        version=RELEASE,
        host=index,
        job_id=job_id,
        secret=secret.hex(),
        port=port,
        index_variable=starter.index_variable,
        indices=dict(starter.indices),
        tells_termination=starter.tells_termination,
        address_variable=starter.address_variable,
        launcher_addresses=starter.addresses or _own_addresses(job),
        network_interfaces=job.network_interfaces,
        command=job.command,
        env=dict(env),
        exported=exported_variables() if starter.exports else {},
        folder=os.getcwd(),
        heartbeat_sec=job.heartbeat.total_seconds(),
        connect_sec=min(10.0, job.start_timeout.total_seconds()),
    )


def _own_addresses(job: Job) -> tuple[str, ...]:
    """Return this host's address on the interface that was asked for; none if none was, or it has other names."""
    try:
        return (interface_address(job.network_interfaces),) if job.network_interfaces else ()
    except ConfigurationError:
        return ()


def agent_command() -> tuple[str, ...]:
    """Return the command of the agent: this interpreter, at the same path on every host."""
    return (sys.executable, "-m", "unidist_launch.agent.agent")


def agent_error(text: str) -> str:
    """Return what agents themselves said went wrong, or what Python said of a missing unidist; "" if neither did."""
    said = [line.removeprefix(ERROR_MARK) for line in text.splitlines() if line.startswith(ERROR_MARK)]
    if said:
        return "; ".join(dict.fromkeys(said))
    if "No module named" in text and "unidist" in text:
        return f"unidist is not installed for {sys.executable} there; every host needs the same environment"
    return ""


def last_line(text: str) -> str:
    """Return the last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"


Reasons = Sequence[tuple[str, str]]
"""Patterns of what a command writes, with what each means for the user; HOST stands for the host's name."""


def meaning_of(host: Host, command: str, returncode: int, text: str, reasons: Reasons) -> str:
    """Return why a command that was to start an agent ended: what the agent said, or what the command wrote means."""
    if said := agent_error(text):
        return said
    for pattern, meaning in reasons:
        found = next((line for line in text.splitlines() if re.search(pattern, line)), None)
        if found is not None:
            return f"{meaning.replace('HOST', host.name)} ({found.strip()})"
    return f"{command} ended with exit code {returncode}: {last_line(text)}"
