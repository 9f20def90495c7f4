"""Which nodes Ray has, and room for how many ranks."""

from __future__ import annotations

import threading
import time

import ray
from ray.exceptions import RayError
from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist.launcher import Host
from unidist_launch.elastic_job import HostSource

_POLL_SEC = 0.5
_CLOSE_SEC = 5.0


class RayHostDiscovery:
    """Counts the ranks that the nodes of Ray have room for, whether that is taken or not; as Horovod's class.

    Args:
        use_gpu: ranks take GPUs.
        cpus_per_worker: CPUs of a rank.
        gpus_per_worker: GPUs of a rank, with `use_gpu`.
    """

    def __init__(
        self,
        use_gpu: bool = False,
        cpus_per_worker: float = 1,
        gpus_per_worker: float = 1,
    ) -> None:
        self._cpus = cpus_per_worker
        self._gpus = gpus_per_worker if use_gpu else 0

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of ranks by node: a name that begins with its address and ends with the node's id."""
        found = {}
        for node in ray.nodes():
            if node["Alive"]:
                slots = self._slots(node["Resources"])
                if slots:
                    found[f"{node['NodeManagerAddress']}/{node['NodeID']}"] = slots
        return found

    def _slots(self, resources: dict[str, float]) -> int:
        slots = [
            int(resources.get(name, 0) // needed)
            for name, needed in (("CPU", self._cpus), ("GPU", self._gpus))
            if needed
        ]
        return min(slots, default=1)


class RayHosts(HostSource):
    """The hosts of an elastic job: Ray's nodes. A thread asks Ray, which may take seconds.

    Args:
        discovery: how the nodes are found.
    """

    def __init__(self, discovery: RayHostDiscovery) -> None:
        self._discovery = discovery
        self._news: tuple[Host, ...] | None = None
        self._error = ""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="unidist-ray-nodes", daemon=True)
        self._thread.start()

    @override
    def poll(self) -> tuple[Host, ...] | None:
        with self._lock:
            news, self._news = self._news, None
            error, self._error = self._error, ""
        if error:
            raise ConfigurationError(error)
        return news

    @override
    def close(self) -> None:
        self._closing.set()
        self._thread.join(_CLOSE_SEC)  # it is a daemon, if Ray does not answer

    def _ask(self) -> None:
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                found = self._discovery.find_available_hosts_and_slots()
            except (RayError, RuntimeError, OSError) as exc:
                with self._lock:
                    self._error = f"Ray does not say which nodes there are: {exc}"
            else:
                with self._lock:
                    self._news = tuple(Host(name, slots) for name, slots in found.items())
            self._closing.wait(max(0.0, _POLL_SEC - (time.monotonic() - began)))
