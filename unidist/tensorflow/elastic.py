"""Elastic state of variables and models, by Horovod's names: `unidist.tensorflow.elastic`."""

from unidist.elastic import run_fn
from unidist.errors import HorovodInternalError
from unidist.horovod_api.lifecycle import init, rank, shutdown
from unidist_tensorflow.elastic.state import (
    HostsUpdatedInterrupt,
    ObjectState,
    Policy,
    State,
    TensorFlowKerasState,
    TensorFlowState,
    run,
)
from unidist_tensorflow.operations.functions import broadcast_object, broadcast_object_fn, broadcast_variables

__all__ = [
    "HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "Policy", "State", "TensorFlowKerasState",
    "TensorFlowState", "broadcast_object", "broadcast_object_fn", "broadcast_variables", "init", "rank", "run",
    "run_fn", "shutdown",
]  # fmt: skip
