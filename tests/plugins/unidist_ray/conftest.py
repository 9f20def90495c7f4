"""A small cluster of Ray's for all tests of this folder, and proof that they leave no process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import psutil
import pytest

pytest.importorskip("ray", reason="ray is not installed; `make test-integrations` has it")

_STORE_BYTES = 80 << 20
_SEC = 60.0


@pytest.fixture(scope="session")
def _ray_variables() -> Iterator[None]:
    """Set what Ray reads when it is imported or started."""
    variables = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def ray_cluster(_ray_variables: None) -> Iterator[None]:
    """One node with 4 CPUs, and with 2 GPUs that are not there."""
    import ray

    if not ray.is_initialized():
        ray.init("local", num_cpus=4, num_gpus=2, include_dashboard=False, object_store_memory=_STORE_BYTES)
    yield
    assert_no_actors()


def assert_no_actors() -> None:
    """Wait until all actors of this test have ended; some take a moment to be gone."""
    deadline = time.monotonic() + _SEC
    while left := _actors():
        assert time.monotonic() < deadline, f"actors are left: {left}"
        time.sleep(0.1)


def _actors() -> list[str]:
    return [
        f"{process.pid} {name}"
        for process in psutil.Process().children(recursive=True)
        if "RankActor" in (name := _name(process))
    ]


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return ""
