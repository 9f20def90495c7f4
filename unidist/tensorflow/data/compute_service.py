"""Horovod's `compute_service`: tf.data's own service on the processes of another job."""

from unidist_data_service._tensorflow.compute_service import (
    ComputeClient,
    ComputeService,
    TfDataServiceConfig,
    compute_worker_fn,
    send_to_data_service,
    tf_data_service,
)

__all__ = [
    "ComputeClient", "ComputeService", "TfDataServiceConfig", "compute_worker_fn", "send_to_data_service",
    "tf_data_service",
]  # fmt: skip
