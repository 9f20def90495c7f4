"""An elastic job on Ray: unidist's launcher in an actor, with Ray's nodes as its hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist.launcher import ElasticLimits, Job
from unidist_launch.elastic_calls import EndedCall, call_command, results_of, run_call
from unidist_ray.callbacks import Callbacks
from unidist_ray.elastic.agents import RayAgents
from unidist_ray.elastic.discovery import RayHostDiscovery, RayHosts
from unidist_ray.placement import WorkerSize
from unidist_ray.settings import HostDiscovery, RaySettings

_TURN_SEC = 0.2
_MOST_RANKS = 1024
"""Without max_workers."""


@dataclass(frozen=True)
class ElasticParams:
    """The size limits of an elastic job; with the names of Horovod's class.

    Args:
        cpus_per_worker: CPUs that each rank takes of its node.
        use_gpu: each rank takes GPUs as well.
        gpus_per_worker: how many; default: 1.
        min_workers: with fewer the job waits for others.
        max_workers: at most so many; None: as many as Ray's nodes have room for.
        reset_limit: so often may ranks come or go; None: any number of times.
        cooldown_range: shortest and longest pause in seconds before a place is used again in which a rank has failed.
        elastic_timeout: longest wait in seconds for `min_workers`.

    Raises:
        ConfigurationError: numbers that do not go together.
    """

    cpus_per_worker: float = 1
    use_gpu: bool = False
    gpus_per_worker: float | None = None
    min_workers: int = 1
    max_workers: int | None = None
    reset_limit: int | None = None
    cooldown_range: Sequence[float] | None = None
    elastic_timeout: float = 600

    def __post_init__(self) -> None:
        if self.min_workers < 1 or (self.max_workers is not None and self.max_workers < self.min_workers):
            raise ConfigurationError(
                f"min_workers={self.min_workers}, max_workers={self.max_workers}: at least 1, and at most max_workers."
            )

    @property
    def size(self) -> WorkerSize:
        """What one worker takes."""
        return WorkerSize.of(self.cpus_per_worker, self.use_gpu, self.gpus_per_worker)


def run_elastic(
    call: bytes,
    name: str,
    *,
    params: ElasticParams,
    settings: RaySettings,
    env: Mapping[str, str],
    logged: Callbacks,
) -> list[Any]:
    """Run a call of `dump_call` as an elastic job; return the results of the ranks that were there at its end.

    Raises:
        RemoteError: the job ended with an error; says which rank failed, and why.
    """
    # In an actor, because the launcher handles signals in its main thread and the nodes have to reach it. On the node
    # of this process: the job shall end with no other node.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    launcher = ray.remote(LauncherActor).options(num_cpus=0, max_restarts=0, scheduling_strategy=here).remote()
    try:
        running = launcher.run.remote(call, params, settings, dict(env), logged.queue)
        while not ray.wait([running], timeout=_TURN_SEC)[0]:
            logged.turn()
        ended = ray.get(running)
        logged.turn()
    finally:
        ray.kill(launcher)
    return results_of(ended, name)


class LauncherActor:
    """Runs the launcher of one job."""

    def run(
        self,
        call: bytes,
        params: ElasticParams,
        settings: RaySettings,
        env: dict[str, str],
        queue: Any,
    ) -> EndedCall:
        """Run the job to its end."""
        size = params.size
        discovery = settings.discovery
        if discovery is None:
            discovery = RayHostDiscovery(bool(size.gpus), size.cpus, size.gpus)
        slots = _Slots(discovery)
        agents = RayAgents(ray.util.get_node_ip_address(), call, size, slots.by_host, queue)
        most = params.max_workers or _MOST_RANKS
        cooldown = params.cooldown_range
        job = Job(
            call_command(),
            max(params.min_workers, min(most, sum(slots.find_available_hosts_and_slots().values()))),
            env=env,
            network_interfaces=tuple(settings.nics or ()),
            start_timeout=timedelta(seconds=settings.timeout_s),
            elastic=ElasticLimits(
                params.min_workers,
                most,
                reset_limit=params.reset_limit,
                timeout=timedelta(seconds=params.elastic_timeout),
                cooldown=None if cooldown is None else (float(cooldown[0]), float(cooldown[1])),
            ),
        )
        return run_call(job, agents, RayHosts(slots))


class _Slots(RayHostDiscovery):
    """Remembers what was found, for those who start agents."""

    def __init__(self, discovery: HostDiscovery) -> None:
        self._discovery = discovery
        self.by_host: dict[str, int] = {}

    @override
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        found = self._discovery.find_available_hosts_and_slots()
        self.by_host.update(found)
        return found
