"""Elastic state of Keras models, by Horovod's names: `unidist.keras.elastic`."""

from typing import TYPE_CHECKING

from unidist.keras._backend import names_of_backend

if TYPE_CHECKING:
    from unidist_tensorflow.elastic.state import TensorFlowKerasState, run
    from unidist_tensorflow.keras.elastic import (
        CommitStateCallback,
        KerasState,
        Policy,
        UpdateBatchStateCallback,
        UpdateEpochStateCallback,
    )

__all__ = [
    "CommitStateCallback", "KerasState", "Policy", "TensorFlowKerasState", "UpdateBatchStateCallback",
    "UpdateEpochStateCallback", "run",
]  # fmt: skip

__getattr__ = names_of_backend(__name__)
