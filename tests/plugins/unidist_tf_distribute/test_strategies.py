"""The strategies with names of `tf.distribute`: their rules, and the numbers of TensorFlow's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unidist.errors import ConfigurationError
from unidist.gradients import ExchangeOptions
from unidist.runtime import PluginManager
from unidist.strategy import Plan, StrategySpec, build, make_plan
from unidist_tf_distribute import Mirrored

_TRAINING = Path(__file__).with_name("_fit.py")


def _plan(line: str, ranks: int) -> Plan:
    registry = PluginManager().load().registry(StrategySpec)
    return make_plan(build(line, registry), ranks, registry)


def test_one_device_is_one_process() -> None:
    assert _plan("one_device", 1).world_size == 1
    with pytest.raises(ConfigurationError, match="leave out -np 4, or use mirrored"):
        _plan("one_device", 4)


@pytest.mark.parametrize("name", ["mirrored", "multi_worker_mirrored"])
def test_the_owner_of_gradients_stands_in_for_data(name: str) -> None:
    plan = _plan(f"{name},accumulate=2", 4)
    assert [each.name for each in plan.strategies if each.axis == "data"] == [name]
    with pytest.raises(ConfigurationError, match="both own the gradient exchange"):
        _plan(f"{name},zero=1", 4)


def test_mirrored_is_for_one_host() -> None:
    runtime: Any = SimpleNamespace(topology=SimpleNamespace(num_nodes=2))
    framework: Any = None
    with pytest.raises(ConfigurationError, match="this job has 2: use multi_worker_mirrored"):
        Mirrored().make_exchange([], runtime, framework, ExchangeOptions())


def test_tpu_says_what_there_is() -> None:
    with pytest.raises(ConfigurationError, match="engine xla"):
        _plan("tpu", 1)


@pytest.mark.parallel
@pytest.mark.slow
def test_mirrored_has_the_numbers_of_tensorflows(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    script = [str(_TRAINING)]
    launch = [sys.executable, "-m", "unidist_launch", "launch", "-np", "2", "--strategy", "mirrored"]
    runs = {"tensorflow": [sys.executable, *script], "unidist": [*launch, *script]}
    for by, words in runs.items():
        found = subprocess.run([*words, by, str(tmp_path / f"{by}.npz")], capture_output=True, text=True, timeout=180)
        assert found.returncode == 0, found.stderr
    theirs, ours = (np.load(tmp_path / f"{by}.npz") for by in runs)
    loss, *weights = theirs.files
    for name in weights:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-12)
    np.testing.assert_allclose(ours[loss], theirs[loss], rtol=1e-6)  # Keras keeps its metrics in float32
