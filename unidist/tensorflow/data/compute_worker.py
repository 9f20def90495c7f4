"""Horovod's `compute_worker`: `unidist launch -np 2 -m unidist.tensorflow.data.compute_worker CONFIGFILE`."""

from unidist.jobs import run_program
from unidist_data_service._tensorflow.compute_service import ComputeService, TfDataServiceConfig, compute_worker_fn
from unidist_data_service._tensorflow.compute_worker import command, main

__all__ = ["ComputeService", "TfDataServiceConfig", "compute_worker_fn", "main"]

if __name__ == "__main__":
    run_program(command)
