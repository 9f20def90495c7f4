"""The control plane of elastic jobs: membership and generations on the launcher's side, and a worker's side of it.

`membership`, `replicas`, `coordinator`, `resumable_coordinator` and `host_links` are pure; `worker_link` and `member`
belong to the workers.
Imports `control`, `settings` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.control.elastic.coordinator import Beat, ElasticCoordinator, JobEvent
    from unidist.control.elastic.host_links import HostLinks
    from unidist.control.elastic.member import Member, is_alone, join, present
    from unidist.control.elastic.membership import NO_STATE, Membership, Phase
    from unidist.control.elastic.replicas import ReplicaShape
    from unidist.control.elastic.resumable_coordinator import ResumableCoordinator, Snapshot
    from unidist.control.elastic.worker_link import Assignment, DismissedError, WorkerLink

__all__ = [
    "Assignment", "Beat", "DismissedError", "ElasticCoordinator", "HostLinks", "JobEvent", "Member", "Membership",
    "NO_STATE", "Phase", "ReplicaShape", "ResumableCoordinator", "Snapshot", "WorkerLink", "is_alone",
    "join", "present",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "coordinator": "Beat ElasticCoordinator JobEvent",
        "host_links": "HostLinks",
        "member": "Member is_alone join present",
        "membership": "Membership NO_STATE Phase",
        "replicas": "ReplicaShape",
        "resumable_coordinator": "Snapshot ResumableCoordinator",
        "worker_link": "Assignment DismissedError WorkerLink",
    },
)
