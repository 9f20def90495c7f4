"""Elastic training in JAX: trees that survive a change of ranks, and arrays whose samples are dealt out again.

Scripts use it as `unidist.jax.elastic`, by Horovod's names. May import `checkpoint`, `operations`, `optimizer` and the
folders below them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_jax.elastic.data import ShardedArrays
    from unidist_jax.elastic.state import (
        HostsUpdatedInterrupt,
        JaxState,
        ObjectState,
        Policy,
        State,
        ending_programs,
        run,
    )
    from unidist_jax.elastic.step_training import TrainingState, translating

__all__ = [
    "ShardedArrays", "HostsUpdatedInterrupt", "JaxState", "ObjectState", "Policy", "State",
    "TrainingState", "ending_programs", "run", "translating",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "data": "ShardedArrays",
        "state": "HostsUpdatedInterrupt JaxState ObjectState Policy State ending_programs run",
        "step_training": "TrainingState translating",
    },
)
