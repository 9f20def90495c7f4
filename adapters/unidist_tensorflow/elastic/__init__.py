"""Elastic training in TensorFlow: state that survives a change of ranks, tf.data that redistributes its samples.

May import `checkpoint`, `operations`, `optimizer` and the folders below them.
"""

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
