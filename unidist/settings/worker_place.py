"""The data that the launcher of an elastic job passes to a process."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class WorkerPlace:
    """The identity of a process in an elastic job, which the launcher passes instead of a rank.

    Args:
        worker: number of this process.
        server: address of the coordinator.
        host_address: at which the other hosts reach this one.
        job_key: equal on all workers of this host.
        secret: the job's secret.
        timeout: longest wait to be admitted to a generation.
        stall_shutdown: longest wait for a rank that does nothing; 0: the one before.
        orphan_timeout: time for a coordinator that is gone to come back; 0: it does not.
    """

    worker: int
    server: tuple[str, int]
    host_address: str
    job_key: str
    secret: bytes
    timeout: timedelta
    stall_shutdown: timedelta = timedelta(0)
    orphan_timeout: timedelta = timedelta(0)

    @property
    def patience(self) -> timedelta:
        """The longest wait for a rank that does not come back from a generation that has ended."""
        return min(self.timeout, self.stall_shutdown or self.timeout)
