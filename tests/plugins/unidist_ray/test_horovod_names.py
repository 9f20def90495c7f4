"""`horovod.ray`, and Horovod's arguments, mean unidist's."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="ray is not installed; `make test-integrations` has it")


def test_horovod_ray_is_answered() -> None:
    script = """
import unidist
unidist.as_horovod()
from horovod.ray import RayExecutor
import horovod.ray.runner
import unidist.ray
assert RayExecutor is unidist.ray.RayExecutor is horovod.ray.runner.RayExecutor
from horovod.ray import ElasticRayExecutor, ray_logger
from horovod.ray.elastic import RayHostDiscovery
from horovod.ray.elastic_v2 import ElasticParams
from horovod.ray.ray_logger import log
assert ElasticRayExecutor is unidist.ray.ElasticRayExecutor and ElasticParams is unidist.ray.ElasticParams
from horovod.ray.elastic import TestDiscovery
assert issubclass(TestDiscovery, RayHostDiscovery)
assert log is unidist.ray.ray_logger.log
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=180)


def test_the_executor_takes_horovods_arguments_in_its_order() -> None:
    from unidist_ray import ElasticParams, ElasticRayExecutor, RayExecutor

    def positional(function: object) -> list[str]:
        parameters = inspect.signature(function).parameters  # type: ignore[arg-type]  # any callable
        return [name for name, each in parameters.items() if each.kind is not each.KEYWORD_ONLY and name != "self"]

    assert positional(RayExecutor) == [
        "settings",
        "num_workers",
        "num_hosts",
        "num_workers_per_host",
        "cpus_per_worker",
        "use_gpu",
        "gpus_per_worker",
        "use_current_placement_group",
        "min_workers",
        "max_workers",
        "reset_limit",
        "cooldown_range",
        "elastic_timeout",
        "override_discovery",
    ]
    assert positional(RayExecutor.start) == ["executable_cls", "executable_args", "executable_kwargs", "extra_env_vars"]
    assert positional(RayExecutor.create_settings) == [
        "timeout_s",
        "ssh_identity_file",
        "ssh_str",
        "placement_group_timeout_s",
        "nics",
    ]
    assert positional(RayExecutor.run) == ["fn", "args", "kwargs", "callbacks"]
    assert positional(RayExecutor.execute) == ["fn", "callbacks"]
    assert positional(ElasticRayExecutor) == [
        "settings",
        "use_gpu",
        "cpus_per_slot",
        "gpus_per_slot",
        "env_vars",
        "override_discovery",
    ]
    assert positional(ElasticRayExecutor.run) == ["worker_fn", "callbacks"]
    assert positional(ElasticParams)[:4] == ["cpus_per_worker", "use_gpu", "gpus_per_worker", "min_workers"]
