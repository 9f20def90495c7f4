"""Durable checkpoints of elastic states: how often, by whom, and the agreement of all ranks on it.

Imports `checkpoint`, `runtime` and the folders below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.elastic.durable.checkpoints import Durable
    from unidist.elastic.durable.commit_agreement import CommitRequests, agree_at_commit
    from unidist.elastic.durable.parts import DurableParts, parts_of
    from unidist.elastic.durable.schedule import CheckpointSchedule

__all__ = [
    "CheckpointSchedule", "Durable", "DurableParts", "CommitRequests", "agree_at_commit", "parts_of",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "checkpoints": "Durable",
        "commit_agreement": "CommitRequests agree_at_commit",
        "parts": "DurableParts parts_of",
        "schedule": "CheckpointSchedule",
    },
)
