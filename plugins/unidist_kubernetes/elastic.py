"""Elastic jobs in pods: every pod that joins is a host, until it goes.

A pod of its own holds the launcher, and no rank. The others connect to it, each says its name and its slots, and waits
for the orders of an agent. Its connection says that it is there: so nobody asks the cluster's API which pods run, and
no pod needs rights for that, nor ssh. Kubernetes puts another pod in the place of one that is lost.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import FrameType

from typing_extensions import override

from unidist.control.codec import Message, WireError, unexpected
from unidist.control.connection import Connection, ConnectionLost
from unidist.control.server import ControlServer
from unidist.control.service import Action, Drop, Publish, Send, Service
from unidist.errors import ConfigurationError
from unidist.jobs.processes import parent_death_signal
from unidist.launcher import ElasticLimits, Host, Job
from unidist_kubernetes.leader import connect_to_leader
from unidist_kubernetes.messages import AgentEnded, JobEnded, PodHere, RunAgent
from unidist_kubernetes.place import Pod, PodRole
from unidist_launch.agent import AgentOrder
from unidist_launch.elastic_job import ElasticRun, HostSource
from unidist_launch.remote import AgentStarter, agent_command

_TERMINATED = 128 + signal.SIGTERM
"""Not 0: a pod that Kubernetes takes back has not done its part, and another takes its place."""


def run(pod: Pod, job: Job, limits: ElasticLimits) -> int:
    """Run an elastic job in the launcher's pod; serve it, in the others. See `Launcher.run`.

    Raises:
        ConfigurationError: these pods are not of an elastic job, or cannot do what the options say.
    """
    if pod.role is None:
        raise ConfigurationError(
            "the pods of this job are fixed; for ranks that come and go write the manifest with --kind jobset and "
            "--min-np."
        )
    if limits.state_dir is not None:
        raise ConfigurationError(
            "another launcher's pod has another address, so no launcher can come back to these ranks; leave "
            "--state-dir out. With --checkpoint-dir, a job that --max-restarts begins again goes on."
        )
    if limits.fallback is not None:
        raise ConfigurationError(
            "the pods of ranks end with the job that they are in, so no other one can begin in them; leave "
            "--fallback-strategy out."
        )
    if pod.role is PodRole.WORKER:
        return _Worker(pod, job).run()
    with ExitStack() as stack:
        pods = Pods(pod)
        return ElasticRun(job, stack, starter_of=lambda host: pods, source=pods, secret=pod.secret).run()


@dataclass(frozen=True)
class _Present:
    """The pods that are there."""

    hosts: tuple[Host, ...]


class Reception(Service):
    """Keeps a list of the pods that are connected, and hands them their orders. Decides; does no I/O."""

    def __init__(self) -> None:
        self._pods: dict[int, Host] = {}

    @override
    def received(self, peer: int, message: Message, now: float) -> Iterable[Action]:
        match message:
            case PodHere(name, slots):
                old = [number for number, host in self._pods.items() if host.name == name]
                for number in old:
                    del self._pods[number]
                self._pods[peer] = Host(name, slots)
                return [*(Drop(number, f"pod {name} has connected again") for number in old), self._present()]
            case AgentEnded():
                return [Publish(message)]
            case _:
                raise unexpected(message)

    @override
    def lost(self, peer: int, reason: str, now: float) -> Iterable[Action]:
        return [self._present()] if self._pods.pop(peer, None) else []

    @override
    def tick(self, now: float) -> Iterable[Action]:
        return ()

    def order(self, name: str, order: str) -> Iterable[Action]:
        """Have the pod of this name run an agent with this order."""
        peer = next((number for number, host in self._pods.items() if host.name == name), None)
        return [Publish(AgentEnded(name, "the pod is gone")) if peer is None else Send(peer, RunAgent(order))]

    def finish(self) -> Iterable[Action]:
        """Tell all pods that the job has ended."""
        return [Send(peer, JobEnded()) for peer in self._pods]

    def _present(self) -> Publish:
        return Publish(_Present(tuple(sorted(self._pods.values(), key=lambda host: host.name))))


class Pods(HostSource, AgentStarter):
    """The pods that have come: the hosts of the job. Their agents start when they are summoned.

    Args:
        pod: this one, with the launcher.

    Raises:
        ConfigurationError: its port cannot be listened on.
    """

    comes_by_itself = True
    exports = False  # every pod has the variables of the manifest

    def __init__(self, pod: Pod) -> None:
        self._reception = Reception()
        try:
            self._server = ControlServer(self._reception, pod.secret, port=pod.port)
        except OSError as exc:
            raise ConfigurationError(f"the launcher's pod cannot listen on port {pod.port}: {exc}") from exc
        self.addresses = (pod.leader,)
        self._problems: dict[str, str] = {}
        self._server.start()

    @override
    def poll(self) -> tuple[Host, ...] | None:
        found = None
        for event in self._server.take_events():
            if isinstance(event, _Present):
                found = event.hosts
            elif isinstance(event, AgentEnded):
                self._problems[event.name] = event.text
        return found

    @override
    def close(self) -> None:
        self._server.call(self._reception.finish)
        self._server.close()

    @override
    def summon(self, host: Host, order: bytes) -> None:
        self._problems.pop(host.name, None)
        # The pods know the secret, and this connection is not encrypted.
        line = replace(AgentOrder.from_line(order), secret="").to_line().decode()
        self._server.call(lambda: self._reception.order(host.name, line))

    @override
    def problem(self, host: Host) -> str:
        return self._problems.get(host.name, "")

    @override
    def command(self, host: Host) -> Sequence[str]:
        raise AssertionError("pods are started by Kubernetes")

    @override
    def explain(self, host: Host, returncode: int, text: str) -> str:
        raise AssertionError("pods are started by Kubernetes")


class _Worker:
    """A pod with ranks: it waits for orders, and runs an agent for each, until the job has ended."""

    def __init__(self, pod: Pod, job: Job) -> None:
        self._pod = pod
        self._patience = job.start_timeout.total_seconds()
        self._agent: subprocess.Popen[bytes] | None = None
        self._is_wanted_back = False

    def run(self) -> int:
        """Serve the launcher; returns 0 when the job has ended, however it did.

        Raises:
            ConfigurationError: the launcher does not answer for longer than --start-timeout.
            SystemExit: Kubernetes takes this pod back.
        """
        # The first process of a container ignores the signals for which it has no handler.
        signal.signal(signal.SIGTERM, self._on_sigterm)
        while True:
            connection, reached = connect_to_leader(self._pod, self._patience)
            try:
                connection.send(PodHere(self._pod.own_name, self._pod.slots))
                incoming = _messages(connection)
                while isinstance(message := next(incoming), RunAgent):
                    text = self._work(message.order, reached)
                    connection.send(AgentEnded(self._pod.own_name, text))
                return 0
            except (ConnectionLost, WireError):
                continue  # it may be back, or the job be gone: then nobody answers
            finally:
                connection.close()

    def _work(self, line: str, reached: str) -> str:
        """Run an agent until the launcher has no more use for it, or it fails; says how it ended."""
        order = replace(
            AgentOrder.from_line(line.encode()),
            secret=self._pod.secret.hex(),
            folder=os.getcwd(),
            launcher_addresses=(reached,),
        )
        self._agent = subprocess.Popen(
            agent_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=parent_death_signal(),
        )
        said, _ = self._agent.communicate(order.to_line())
        code, self._agent = self._agent.returncode, None
        if self._is_wanted_back:
            raise SystemExit(_TERMINATED)
        lines = said.decode(errors="replace").strip().splitlines()
        return f"its agent ended with exit code {code}{': ' + lines[-1] if lines else ''}"

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Kubernetes takes this pod back: the agent tells the launcher, which has the ranks leave."""
        self._is_wanted_back = True
        if self._agent is None:
            raise SystemExit(_TERMINATED)
        self._agent.send_signal(signal.SIGTERM)


def _messages(connection: Connection) -> Iterator[Message]:
    """Yield what the launcher sends; keep-alive probes find out if its machine is gone.

    Raises:
        ConnectionLost: the launcher is gone.
    """
    while True:
        select.select([connection], [connection] if connection.pending_bytes else [], [])
        connection.flush()
        yield from connection.receive()


__all__ = ["Pods", "Reception", "run"]
