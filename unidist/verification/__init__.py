"""`--verify`: does what a strategy has changed still compute what the script's own model does?

`replicas` compares digests of the values that several ranks hold, after the first updates and at checkpoints.
`outputs` compares what the changed model returns with what the unchanged one does; the adapters run both.
Imports `runtime`, `checkpoint.format` and the folders below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.verification.outputs import Leaf, difference, raise_together
    from unidist.verification.replicas import ReplicaCheck, digests

__all__ = ["Leaf", "ReplicaCheck", "difference", "digests", "raise_together"]

__getattr__ = lazy_names(__name__, {"outputs": "Leaf difference raise_together", "replicas": "ReplicaCheck digests"})
