"""Orders for the agents of an elastic job, and the ways to start them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from unidist.launcher import Host, Job
from unidist_launch.agent.order import AgentOrder
from unidist_launch.elastic_job.state import JobIdentity
from unidist_launch.options import hosts as host_list
from unidist_launch.remote.hosts import AgentStarter, LocalAgents, order_of
from unidist_launch.remote.ssh import SshAgents

_LATER = timedelta(seconds=60)

StarterOf = Callable[[Host], AgentStarter]
"""How the agent of a host is started."""


def by_ssh(job: Job, *, is_here: bool) -> StarterOf:
    """Return how agents are started where nobody else does it: here at once, elsewhere by ssh.

    Args:
        job: the job.
        is_here: no other host can ever be among the job's.

    Raises:
        ConfigurationError: other hosts cannot be reached so.
    """
    here = LocalAgents()
    elsewhere = None if is_here else SshAgents(job.remote_shell)
    return lambda host: here if elsewhere is None or host_list.is_local(host) else elsewhere


class Orders:
    """The orders of one job.

    Args:
        job: the job; `job.elastic` is set.
        identity: of the job.
        port: of the control server.
        starter_of: how the agent of a host is started.
    """

    def __init__(self, job: Job, identity: JobIdentity, port: int, starter_of: StarterOf) -> None:
        self._job = job
        self._identity = identity
        self._port = port
        self.starter_of = starter_of

    def order_for(self, index: int, starter: AgentStarter) -> AgentOrder:
        """Return the orders of the agent of this index."""
        assert self._job.elastic is not None
        limits = self._job.elastic
        orphan_sec = 0.0 if limits.state_dir is None else limits.orphan_timeout.total_seconds()
        longest = limits.timeout + _LATER  # the launcher gives up first: it has a fallback, and knows who is missing
        variables = {"UNIDIST_ELASTIC_TIMEOUT_SEC": f"{longest.total_seconds():g}"}
        if orphan_sec:
            variables["UNIDIST_ORPHAN_TIMEOUT_SEC"] = f"{orphan_sec:g}"
        if limits.durable is not None:
            variables |= limits.durable.variables()
        order = order_of(
            self._job,
            starter,
            index=index,
            job_id=self._identity.job_id,
            secret=self._identity.secret,
            port=self._port,
            env={**variables, **self._job.env},
        )
        return replace(order, tells_termination=True, is_elastic=True, orphan_sec=orphan_sec)
