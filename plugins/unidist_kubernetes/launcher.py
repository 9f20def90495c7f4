"""The launcher of pods: the same command runs in every pod of a job, and the first pod leads.

Pod 0 holds the control server and an agent of its own; every other pod is an agent that connects to it. Nobody needs to
reach the cluster's API. `place` says which pod this is; jobs whose pods come and go are in `elastic`.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from typing_extensions import override

from unidist.control.connection import ConnectionLost
from unidist.control.messages import RELEASE
from unidist.engine import Availability
from unidist.errors import ConfigurationError
from unidist.jobs import interface_address
from unidist.launcher import Host, Job, KnowsHosts, Launcher, RunsElasticJobs, StartsSideProcesses
from unidist.settings import visible_devices
from unidist_kubernetes import elastic
from unidist_kubernetes.leader import connect_to_leader
from unidist_kubernetes.place import ROLE, Pod
from unidist_launch.agent import agent
from unidist_launch.agent.order import AgentOrder
from unidist_launch.display import machine
from unidist_launch.options import hosts as host_list
from unidist_launch.remote.hosts import AgentStarter, LocalAgents
from unidist_launch.remote.run import RemoteRun


class KubernetesLauncher(Launcher, KnowsHosts, RunsElasticJobs, StartsSideProcesses):
    """Runs the ranks of a job in pods: those of a manifest of `unidist kubernetes manifest`, a TFJob or a TrainJob."""

    def availability(self) -> Availability:
        """Usable on Linux; in the pods of a job."""
        if platform.system() != "Linux":
            return Availability(False, f"needs Linux, this is {platform.system()}")
        return Availability(True, "in the pods of `unidist kubernetes manifest`")

    @override
    def hosts(self) -> tuple[Host, ...]:
        pod = Pod.read(os.environ)
        slots = pod.slots or visible_devices(os.environ) or machine.usable_cores()  # all pods are alike
        return tuple(Host(name, slots) for name in pod.names)

    def run(self, job: Job) -> int:
        """Run the job in pod 0; in the others, serve it. See `Launcher.run`.

        Pods other than the first return 0 when the job has ended, however it did: pod 0 decides what becomes of it.

        Raises:
            ConfigurationError: pods did not come; or this pod cannot reach the first, or does not belong to it.
        """
        pod = Pod.read(os.environ)
        if job.elastic is not None:
            return elastic.run(pod, job, job.elastic)
        if pod.role is not None:
            raise ConfigurationError(
                f"these pods come and go ({ROLE}={pod.role}), but the job is not elastic: give --min-np, or write the "
                "manifest again."
            )
        hosts = host_list.used(self.hosts(), job.num_proc)
        if job.hosts and tuple(job.hosts) != hosts:
            raise ConfigurationError(
                "-H and --hostfile have no place in a pod: the manifest says which pods there are."
            )
        if pod.task is not None:
            return _serve(pod, job, hosts)
        if servers := pod.others.get("ps", 0):
            _check_servers(job, servers)
        if pod.index >= len(hosts):
            print(f"unidist: -np {job.num_proc} needs {len(hosts)} pods; this one is not used.", file=sys.stderr)
            return 0
        if pod.index > 0:
            return _serve(pod, job, hosts)
        # By place, not by name: names may repeat, of pods with the network of their host.
        starters = [LocalAgents(), *[_PodAgents()] * (len(hosts) - 1)]
        with ExitStack() as stack:
            try:
                run = RemoteRun(
                    *(job, hosts, starters, stack),
                    secret=pod.secret,
                    port=pod.port,
                    guests=pod.others,
                    first_guest=len(pod.names),
                )
            except OSError as exc:
                raise ConfigurationError(f"pod 0 cannot listen on port {pod.port}: {exc}") from exc
            return run.run()


def _check_servers(job: Job, number: int) -> None:
    """Make sure that pods for parameter servers have something to run."""
    if not any(each.role == "ps" for each in job.side_processes):
        raise ConfigurationError(
            f"TF_CONFIG has {number} pods of the type PS, and no strategy of this job has parameter servers: give "
            f"--strategy parameter_server=async:servers={number}, or leave the pods out."
        )


class _PodAgents(AgentStarter):
    """Agents that Kubernetes starts: the other pods."""

    comes_by_itself = True

    def command(self, host: Host) -> Sequence[str]:
        raise AssertionError("pods are started by Kubernetes")

    def explain(self, host: Host, returncode: int, text: str) -> str:
        raise AssertionError("pods are started by Kubernetes")


def _serve(pod: Pod, job: Job, hosts: Sequence[Host]) -> int:
    """Be the agent of this pod until the launcher has no more use for it."""
    order = AgentOrder(
        version=RELEASE,
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
        role="" if pod.task is None else pod.task[0],
        role_index=0 if pod.task is None else pod.task[1],
        num_ports=max(host.slots for host in hosts) + len(job.side_processes),
    )
    connection, reached = connect_to_leader(pod, job.start_timeout.total_seconds())
    own = interface_address(job.network_interfaces) if job.network_interfaces else ""
    try:
        agent.serve(order, connection, reached, own or agent.routed_address(reached, pod.port))
    except ConnectionLost as exc:
        raise ConfigurationError(f"pod {pod.index} has lost the first pod, {pod.leader}: {exc}") from exc
    return 0
