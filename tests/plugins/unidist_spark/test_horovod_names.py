"""`horovod.spark`, and Horovod's arguments, mean unidist's."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from unidist_spark import run

pytest.importorskip("pyspark", reason="pyspark is not installed; `make test-integrations` has it")


def test_horovod_spark_is_answered() -> None:
    script = """
import unidist
unidist.as_horovod()
import horovod.spark
import unidist.spark
from horovod.spark.common.store import Store
from horovod.spark.keras import KerasEstimator, KerasModel
from horovod.spark.torch import TorchEstimator, TorchModel
assert horovod.spark.run is unidist.spark.run
assert issubclass(KerasEstimator, unidist.spark.KerasEstimator) and Store is unidist.spark.Store
assert issubclass(TorchEstimator, unidist.spark.TorchEstimator) and TorchModel is unidist.spark.TorchModel
from horovod.spark.common.backend import Backend, SparkBackend, default_num_proc
from horovod.spark.task import get_available_devices
assert issubclass(SparkBackend, Backend) and get_available_devices() == []
assert horovod.spark.run_elastic is unidist.spark.run_elastic
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_run_takes_horovods_arguments_in_its_order() -> None:
    found = [name for name, each in inspect.signature(run).parameters.items() if each.kind is not each.KEYWORD_ONLY]
    assert found == [
        "fn",
        "args",
        "kwargs",
        "num_proc",
        "start_timeout",
        "use_mpi",
        "use_gloo",
        "extra_mpi_args",
        "env",
        "stdout",
        "stderr",
        "verbose",
        "nics",
        "prefix_output_with_timestamp",
        "executable",
    ]
