"""`--verify`: does what a strategy has changed still compute what the script's own model does?

`replicas` compares digests of the values that several ranks hold, after the first updates and at checkpoints.
`first_batch` compares what the changed model returns with what the unchanged one does, by `outputs`; the adapters run
both. `replay` compares what a rank computes with what it computes again. Imports `runtime`, `checkpoint.format` and the
folders below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.verification.first_batch import (
        MAX_COPIED_BYTES,
        FirstBatchCheck,
        NotComparableError,
        first_batch_check,
        pending_check,
    )
    from unidist.verification.outputs import Leaf, difference
    from unidist.verification.replay import Digests, Replay
    from unidist.verification.replicas import CheckpointCheck, ReplicaCheck, replica_check

__all__ = [
    "MAX_COPIED_BYTES", "CheckpointCheck", "Digests", "FirstBatchCheck", "Leaf", "NotComparableError", "Replay",
    "ReplicaCheck", "difference", "first_batch_check", "pending_check", "replica_check",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "first_batch": "MAX_COPIED_BYTES FirstBatchCheck NotComparableError first_batch_check pending_check",
        "outputs": "Leaf difference",
        "replay": "Digests Replay",
        "replicas": "CheckpointCheck ReplicaCheck replica_check",
    },
)
