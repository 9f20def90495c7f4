"""The launcher of pods: the same command runs in every pod of a job, and the first pod leads.

Pod 0 holds the control server and an agent of its own; every other pod is an agent that connects to it. Nobody needs to
reach the cluster's API. `unidist kubernetes manifest` writes what sets the variables below.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from unidist._version import __version__
from unidist.control.client import connect
from unidist.control.connection import Connection, ConnectionLost
from unidist.control.wire import WireError
from unidist.engine import Availability
from unidist.errors import ConfigurationError, UnidistError
from unidist.launcher import Host, Job, KnowsHosts, Launcher
from unidist_launch.agent import agent
from unidist_launch.agent.order import AgentOrder
from unidist_launch.options import hosts as host_list
from unidist_launch.remote.hosts import AgentStarter, LocalAgents
from unidist_launch.remote.run import RemoteRun

LEADER = "UNIDIST_POD_LEADER"
"""HOST:PORT of the first pod; by it, a pod of ours is recognised."""

PODS = "UNIDIST_PODS"
SLOTS = "UNIDIST_POD_SLOTS"
SECRET_FILE = "UNIDIST_POD_SECRET_FILE"
INDEX = "JOB_COMPLETION_INDEX"
"""Set by Kubernetes itself in the pods of an indexed Job."""

MIN_SECRET_BYTES = 16
_RETRY_SEC = 0.2


@dataclass(frozen=True)
class Pod:
    """This pod's place, as the manifest and Kubernetes tell it.

    Args:
        index: of this pod; pod 0 leads.
        num_pods: number of pods.
        slots: ranks of each.
        leader: where pod 0 is reached.
        port: of its control server.
        secret: the job's secret.
    """

    index: int
    num_pods: int
    slots: int
    leader: str
    port: int
    secret: bytes

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Pod:
        """Read the variables of a pod.

        Raises:
            ConfigurationError: this is no pod of a manifest of ours, or a variable cannot be read; names it.
        """
        if LEADER not in environ:
            raise ConfigurationError(
                f"the launcher kubernetes runs in the pods of a job, and this is none ({LEADER} is not set). "
                "`unidist kubernetes manifest` writes such a job."
            )
        leader, _, port = environ[LEADER].rpartition(":")
        numbers = {name: _number(environ, name) for name in (PODS, SLOTS, INDEX)}
        if not leader or not port.isdigit():
            raise ConfigurationError(f"{LEADER}={environ[LEADER]!r} is not HOST:PORT.")
        if numbers[INDEX] >= numbers[PODS] or numbers[SLOTS] < 1:
            raise ConfigurationError(
                f"{INDEX}={numbers[INDEX]}, {PODS}={numbers[PODS]}, {SLOTS}={numbers[SLOTS]}: the index is below the "
                "number of pods, and each has at least 1 slot. completions of the Job is the number of pods."
            )
        return cls(numbers[INDEX], numbers[PODS], numbers[SLOTS], leader, int(port), _secret(environ))

    def name_of(self, index: int) -> str:
        """Return the name of a pod, for messages and as a host: that of the leader with another index."""
        label = self.leader.partition(".")[0]
        return f"{label.removesuffix('-0') if label.endswith('-0') else 'pod'}-{index}"


class KubernetesLauncher(Launcher, KnowsHosts):
    """Runs the ranks of a job in the pods of a Job or JobSet that `unidist kubernetes manifest` has written."""

    def availability(self) -> Availability:
        """Usable on Linux; in the pods of a manifest."""
        if platform.system() != "Linux":
            return Availability(False, f"needs Linux, this is {platform.system()}")
        return Availability(True, "in the pods of `unidist kubernetes manifest`")

    @override
    def hosts(self) -> tuple[Host, ...]:
        pod = Pod.read(os.environ)
        return tuple(Host(pod.name_of(index), pod.slots) for index in range(pod.num_pods))

    def run(self, job: Job) -> int:
        """Run the job, in pod 0; serve it, in the others. See `Launcher.run`.

        Pods other than the first return 0 when the job has ended, however it did: pod 0 decides what becomes of it.

        Raises:
            ConfigurationError: pods did not come; or this pod cannot reach the first, or does not belong to it.
        """
        pod = Pod.read(os.environ)
        hosts = host_list.used(self.hosts(), job.num_proc)
        if job.hosts and tuple(job.hosts) != hosts:
            raise ConfigurationError(
                "-H and --hostfile have no place in a pod: the manifest says which pods there are."
            )
        if pod.index >= len(hosts):
            print(f"unidist: -np {job.num_proc} needs {len(hosts)} pods; this one is not used.", file=sys.stderr)
            return 0
        if pod.index > 0:
            return _serve(pod, job)
        here, elsewhere = LocalAgents(), _PodAgents()
        first = hosts[0].name
        with ExitStack() as stack:
            try:
                run = RemoteRun(
                    *(job, hosts, lambda host: here if host.name == first else elsewhere, stack),
                    secret=pod.secret,
                    port=pod.port,
                )
            except OSError as exc:
                raise ConfigurationError(f"pod 0 cannot listen on port {pod.port} ({LEADER}): {exc}") from exc
            return run.run()


class _PodAgents(AgentStarter):
    """Agents that Kubernetes starts: the other pods."""

    comes_by_itself = True

    def command(self, host: Host) -> Sequence[str]:
        raise AssertionError("pods are started by Kubernetes")

    def explain(self, host: Host, returncode: int, text: str) -> str:
        raise AssertionError("pods are started by Kubernetes")


def _serve(pod: Pod, job: Job) -> int:
    """Be the agent of this pod until the launcher has no more use for it."""
    order = AgentOrder(
        version=__version__,
        host=pod.index,
        job_id=f"{socket.gethostname()}-{os.getpid()}",
        secret=pod.secret.hex(),
        port=pod.port,
        index_variable="",
        address_variable="",
        launcher_addresses=(pod.leader,),
        network_interfaces=job.network_interfaces,
        command=job.command,
        env=dict(job.env),
        exported={},
        folder=os.getcwd(),
        heartbeat_sec=job.heartbeat.total_seconds(),
        connect_sec=job.start_timeout.total_seconds(),
    )
    connection, reached = _connect(pod, job.start_timeout.total_seconds())
    own = agent.interface_address(job.network_interfaces) if job.network_interfaces else ""
    try:
        agent.serve(order, connection, reached, own or agent.routed_address(reached, pod.port))
    except ConnectionLost as exc:
        raise ConfigurationError(f"pod {pod.index} has lost the first pod, {pod.leader}: {exc}") from exc
    return 0


def _connect(pod: Pod, seconds: float) -> tuple[Connection, str]:
    """Connect to pod 0, which may not have started yet, nor be known to the cluster's DNS; returns its address too.

    Raises:
        ConfigurationError: it did not answer in time, or does not know the secret.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            address = str(socket.getaddrinfo(pod.leader, pod.port, type=socket.SOCK_STREAM)[0][4][0])
            return connect((address, pod.port), pod.secret, timeout=max(0.1, left)), address
        except WireError as exc:
            raise ConfigurationError(
                f"pod {pod.index} and {pod.leader}:{pod.port} do not trust each other: {exc}. Do all pods mount the "
                "same Secret?"
            ) from exc
        except (OSError, UnidistError) as exc:  # gaierror and TimeoutError are OSErrors
            if left <= 0:
                raise ConfigurationError(
                    f"pod {pod.index} cannot reach the first pod, {pod.leader}:{pod.port}, in {seconds:g} seconds "
                    f"(--start-timeout): {exc}. Is it running, is there the headless Service, do all pods mount "
                    "the same Secret, and does a network policy allow this port?"
                ) from exc
        time.sleep(_RETRY_SEC)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdigit():
        tip = "; the Job needs completionMode: Indexed" if name == INDEX else ""
        raise ConfigurationError(f"{name}={text!r} is not a whole number{tip}.")
    return int(text)


def _secret(environ: Mapping[str, str]) -> bytes:
    file = environ.get(SECRET_FILE, "")
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as exc:
        raise ConfigurationError(
            f"{SECRET_FILE}={file!r}: the job's secret cannot be read ({exc.strerror}); is the Secret mounted there?"
        ) from exc
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigurationError(
            f"{SECRET_FILE}={file!r} holds {len(secret)} bytes; a secret has at least {MIN_SECRET_BYTES}, random ones."
        )
    return secret
