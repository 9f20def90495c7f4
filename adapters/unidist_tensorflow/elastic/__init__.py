"""Elastic training in TensorFlow: state that survives a change of ranks, tf.data that redistributes its samples.

May import `checkpoint`, `operations`, `optimizer` and the folders below them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_tensorflow.elastic.state import (
        HostsUpdatedInterrupt,
        ObjectState,
        Policy,
        State,
        TensorFlowKerasState,
        TensorFlowState,
        run,
    )

__all__ = ["HostsUpdatedInterrupt", "ObjectState", "Policy", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

__getattr__ = lazy_names(
    __name__,
    {
        "state": "HostsUpdatedInterrupt ObjectState Policy State TensorFlowKerasState TensorFlowState run",
    },
)
