"""Jobs on Spark: `run` runs a function as ranks in the tasks of a stage in barrier mode.

`runner` starts the stage and watches it, `task` is what each task does. `estimators/` train on the rows of a DataFrame,
which `store` keeps and `row_groups` reads. `elastic` has jobs whose ranks come and go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_spark.backend import Backend, SparkBackend, default_num_proc
    from unidist_spark.elastic import run_elastic
    from unidist_spark.estimators import KerasEstimator, KerasModel, TorchEstimator, TorchModel
    from unidist_spark.runner import HorovodRunner, run
    from unidist_spark.store import Store
    from unidist_spark.task import get_available_devices

__all__ = [
    "Backend",
    "HorovodRunner",
    "KerasEstimator",
    "KerasModel",
    "SparkBackend",
    "Store",
    "TorchEstimator",
    "TorchModel",
    "default_num_proc",
    "get_available_devices",
    "run",
    "run_elastic",
]

__getattr__ = lazy_names(
    __name__,
    {
        "backend": "Backend SparkBackend default_num_proc",
        "estimators": "KerasEstimator KerasModel TorchEstimator TorchModel",
        "elastic": "run_elastic",
        "runner": "HorovodRunner run",
        "store": "Store",
        "task": "get_available_devices",
    },
)
