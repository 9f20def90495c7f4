"""What the launcher of an elastic job tells a process. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class WorkerPlace:
    """What the launcher of an elastic job tells a process instead of a rank.

    Args:
        worker: number of this process.
        server: address of the coordinator.
        host_address: at which the other hosts reach this one.
        job_key: equal on all workers of this host.
        secret: the job's secret.
        timeout: longest wait for a generation that takes this process in.
        orphan_timeout: how long a coordinator that is gone may take to come back; 0: it does not.
    """

    worker: int
    server: tuple[str, int]
    host_address: str
    job_key: str
    secret: bytes
    timeout: timedelta
    orphan_timeout: timedelta = timedelta(0)
