"""Nodes that seem to come and go, to try an elastic job on a cluster that does not change."""

from __future__ import annotations

import logging
import random
import time

from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist_ray.elastic.discovery import RayHostDiscovery

_log = logging.getLogger("unidist.ray")


class ChangingHosts(RayHostDiscovery):
    """Hides a node of Ray's, or shows a hidden one again, at regular intervals; Horovod's `TestDiscovery`.

    Args:
        min_hosts: with so many nodes left, one is shown again.
        max_hosts: with so many nodes, one is hidden.
        change_frequency_s: seconds between changes.
        use_gpu: see `RayHostDiscovery`.
        cpus_per_slot: CPUs of a rank.
        gpus_per_slot: GPUs of a rank, with `use_gpu`.
        verbose: log the nodes at each change.
        seed: of the choice of nodes; None: another one each time.
        _graceful: Horovod's; False, which kills the node itself, is an error.

    Raises:
        ConfigurationError: the arguments do not go together.
    """

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float = 1,
        verbose: bool = True,
        _graceful: bool = True,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)
        if not 0 < min_hosts <= max_hosts or change_frequency_s < 0:
            raise ConfigurationError(
                f"TestDiscovery(min_hosts={min_hosts}, max_hosts={max_hosts}, change_frequency_s={change_frequency_s}):"
                " give 0 < min_hosts <= max_hosts, and no negative time."
            )
        if not _graceful:
            raise ConfigurationError("TestDiscovery(_graceful=False): unidist kills no node; leave it out.")
        self._limits = (min_hosts, max_hosts)
        self._interval_sec = change_frequency_s
        self._verbose = verbose
        self._random = random.Random(seed)
        self._hidden: set[str] = set()
        self._changed = time.monotonic()

    @override
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        found = super().find_available_hosts_and_slots()
        self._hidden &= found.keys()
        is_due = time.monotonic() - self._changed >= self._interval_sec
        if is_due and found:
            self._changed = time.monotonic()
            self._change(found)
        shown = {name: slots for name, slots in found.items() if name not in self._hidden}
        if is_due and self._verbose:
            _log.warning("TestDiscovery shows %d of %d nodes: %s", len(shown), len(found), ", ".join(shown))
        return shown

    def _change(self, found: dict[str, int]) -> None:
        """Hide or show one node; at the limits there is no choice which."""
        shown = sorted(found.keys() - self._hidden)
        fewest, most = self._limits
        hides = len(shown) > fewest and (len(shown) >= most or self._random.random() < 0.5)
        if hides:
            self._hidden.add(self._random.choice(shown))
        elif self._hidden:
            self._hidden.discard(self._random.choice(sorted(self._hidden)))
