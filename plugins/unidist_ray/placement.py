"""Room for the workers of a job: a placement group of Ray's."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
from ray.util import get_current_placement_group, placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from unidist.errors import ConfigurationError


@dataclass(frozen=True)
class WorkerSize:
    """The resources that one worker takes of a node.

    Args:
        cpus: number of CPUs.
        gpus: number of GPUs.
    """

    cpus: float = 1
    gpus: float = 0

    @classmethod
    def of(cls, cpus: float, use_gpu: bool, gpus: float | None) -> WorkerSize:
        """Return the size that these arguments of Horovod's mean.

        Raises:
            ConfigurationError: there are GPUs, and yet there are none.
        """
        if gpus is not None and not use_gpu:
            raise ConfigurationError(f"gpus_per_worker={gpus} without use_gpu=True: give both, or neither.")
        return cls(cpus, (1 if gpus is None else gpus) if use_gpu else 0)

    def resources(self, count: int = 1) -> dict[str, float]:
        """Return what `count` workers take, as Ray counts it."""
        needed = {"CPU": self.cpus * count, "GPU": self.gpus * count}
        return {name: number for name, number in needed.items() if number}


class Room:
    """Reserves room for workers in a cluster until it is closed.

    Args:
        size: of a worker.
        bundles: numbers of workers that belong together on a node.
        spread: each bundle has a node of its own; otherwise nodes are filled up.
        use_current: workers go into the placement group that this code runs in, as under Ray Tune, if there is one.
        timeout: longest wait for the room.

    Raises:
        ConfigurationError: there is no such room, or it does not become free in time; says what is there.
    """

    def __init__(
        self, size: WorkerSize, bundles: list[int], *, spread: bool, use_current: bool, timeout: timedelta
    ) -> None:
        self._size = size
        current = get_current_placement_group() if use_current else None
        self._is_own = current is None
        if current is not None:
            # Its bundles are somebody else's choice: Ray finds the workers a place among them.
            self._group: PlacementGroup = current
            self._bundle_of = [-1] * sum(bundles)
            return
        # A bundle of no resources is not allowed: a worker that takes none still has to be placed.
        wanted = [size.resources(count) or {"CPU": 0.001} for count in bundles]
        self._group = placement_group(wanted, strategy="STRICT_SPREAD" if spread else "PACK")
        self._bundle_of = [index for index, count in enumerate(bundles) for _ in range(count)]
        if not self._group.wait(timeout.total_seconds()):
            self.close()
            asked = f"{len(bundles)} x {wanted[0]}" + (", each on a node of its own" if spread else "")
            raise ConfigurationError(
                f"Ray found no room for {sum(bundles)} workers ({asked}) in {timeout.total_seconds():g} s. The cluster "
                f"has {_shown(ray.cluster_resources())}; {_shown(ray.available_resources())} are free. Ask for fewer "
                "or smaller workers, or wait longer: placement_group_timeout_s."
            )

    def options(self, worker: int) -> dict[str, Any]:
        """Return the options by which Ray starts the actor of a worker there."""
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group,
            placement_group_bundle_index=self._bundle_of[worker],
            placement_group_capture_child_tasks=False,
        )
        return {"num_cpus": self._size.cpus, "num_gpus": self._size.gpus, "scheduling_strategy": strategy}

    def close(self) -> None:
        """Give the room back."""
        if self._is_own:
            remove_placement_group(self._group)


def _shown(resources: dict[str, float]) -> str:
    found = {name: number for name, number in sorted(resources.items()) if name in ("CPU", "GPU")}
    return ", ".join(f"{number:g} {name}" for name, number in found.items()) or "no CPU and no GPU"
