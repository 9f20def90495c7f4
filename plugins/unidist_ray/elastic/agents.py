"""The agents of an elastic job: on each node of Ray's an actor that runs one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from typing_extensions import override

from unidist.jobs.pool import Record
from unidist.launcher import Host
from unidist_launch.elastic_calls import CallAgents, run_agent
from unidist_ray.elastic.logged import forward
from unidist_ray.placement import WorkerSize

_LEAVE_SEC = 10.0


class AgentActor:
    """Runs the agent of a node, which starts the node's ranks."""

    def run(self, order: bytes, call: bytes, queue: Any) -> tuple[str, list[Record]]:
        """See `run_agent`. Ray calls it in the actor's main thread, so the agent dies with the actor.

        Args:
            order: of the launcher.
            call: what each rank runs.
            queue: gets what ranks log; None: nobody does.
        """
        return run_agent(order, call, None if queue is None else partial(forward, queue))


class RayAgents(CallAgents):
    """Starts the agents of an elastic job on Ray's nodes.

    Args:
        address: at which the agents reach the launcher.
        call: what each rank runs.
        size: of a rank.
        slots: by host.
        queue: gets what ranks log; None: nobody does.
    """

    def __init__(self, address: str, call: bytes, size: WorkerSize, slots: Mapping[str, int], queue: Any) -> None:
        super().__init__(address)
        self._queue = queue
        self._call = call
        self._size = size
        self._slots = slots
        self._actors: dict[str, tuple[Any, Any]] = {}

    @override
    def summon(self, host: Host, order: bytes) -> None:
        strategy = NodeAffinitySchedulingStrategy(host.name.rpartition("/")[2], soft=False)
        slots = self._slots.get(host.name, 1)
        options = {"num_cpus": self._size.cpus * slots, "num_gpus": self._size.gpus * slots, "max_restarts": 0}
        actor = ray.remote(AgentActor).options(scheduling_strategy=strategy, **options).remote()
        self._actors[host.name] = (actor, actor.run.remote(order, self._call, self._queue))

    @override
    def problem(self, host: Host) -> str:
        _, reference = self._actors[host.name]
        if not ray.wait([reference], timeout=0)[0]:
            return ""
        try:
            return f"its agent ended with {ray.get(reference)[0]}"
        except RayError as exc:
            return f"Ray could not run its agent: {str(exc).strip().splitlines()[0]}"

    @override
    def dismiss(self, host: Host, *, patient: bool) -> None:
        actor, reference = self._actors.pop(host.name)
        if ray.wait([reference], timeout=_LEAVE_SEC if patient else 0)[0]:
            with contextlib.suppress(RayError):  # its node is gone, and what its ranks returned with it
                self.records += ray.get(reference)[1]
        ray.kill(actor)
