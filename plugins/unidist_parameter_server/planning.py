"""Estimates of time and memory with parameter servers, for the planner."""

from __future__ import annotations

from dataclasses import dataclass

from unidist.cost_model import RankMemory, RankStep, SearchProblem, WorkingMemory, Workload, served
from unidist.errors import ConfigurationError
from unidist.mesh import DATA_AXIS, Mesh


@dataclass(frozen=True)
class ServerOptions:
    """The part of a strategy line that concerns servers.

    Args:
        num_servers: processes; 0: memory that all workers of one host share.
        together: all workers push and fetch at the same time.
        push_every: steps.
        fetch_every: likewise.
        copies: servers that get each push.
        keeps_state: the optimizer runs on the store, which has its state.
    """

    num_servers: int
    together: bool
    push_every: int
    fetch_every: int
    copies: int
    keeps_state: bool


def predicted(step: RankStep, servers: ServerOptions, mesh: Mesh, problem: SearchProblem) -> RankStep:
    """Return the step with pushes and fetches; see `PredictsStepTime.predict`.

    Workers of an asynchronous job compute while others push. So a worker waits for its own messages alone, unless the
    links are busy longer than it computes. In memory that workers share, each applies an equal part of all pushes.

    Raises:
        ConfigurationError: shared memory, and workers on several hosts.
    """
    cluster, workers = problem.cluster, mesh.size(DATA_AXIS)
    group = cluster.group(mesh, DATA_AXIS)
    if not servers.num_servers and group.hosts > 1:
        raise ConfigurationError(
            f"parameter_server without servers is memory of one host, and {workers} workers are on {group.hosts} hosts "
            f"of {cluster.ranks_per_host} ranks. Give servers=N"
        )
    num = servers.num_servers or workers
    waiting = 1.0
    if not servers.together and workers > 1:
        num_bytes = float(problem.work.workload(1).model.num_trained * 4)
        alone = cluster.seconds("push", num_bytes, group._replace(per_host=1), servers=max(num, group.hosts))
        waiting = min(1.0, alone / cluster.seconds("push", num_bytes, group, servers=num))
    return served(
        step,
        servers=num,
        waiting=waiting,
        push_every=servers.push_every,
        fetch_every=servers.fetch_every,
        copies=servers.copies,
    )


def estimated(memory: RankMemory, workload: Workload, servers: ServerOptions, mesh: Mesh) -> RankMemory:
    """Return what a worker holds: the optimizer's state is on the servers, or in memory that the workers share."""
    workers = mesh.size(DATA_AXIS)
    if servers.num_servers:
        return memory.widths(optimizer=0.0, master=0.0) if servers.keeps_state else memory
    memory = memory.add(WorkingMemory("store that workers share", workload.model.num_trained // workers))
    return memory.split(workers, "optimizer", "master") if servers.keeps_state else memory
