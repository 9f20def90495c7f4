"""Where PyTorch is not installed, and unidist is, from its wheel. `make test-without-torch` makes such a place."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorflow_ranks import ENVIRONMENT

import unidist
from unidist.jobs.pool.pool import RankPool

pytestmark = pytest.mark.without_torch

ROOT = Path(__file__).resolve().parents[1]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `unidist ARGUMENTS` as it was installed."""
    program = Path(sysconfig.get_path("scripts"), "unidist")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=180, check=False)


def test_torch_is_not_installed() -> None:
    assert importlib.util.find_spec("torch") is None
    with pytest.raises(ImportError, match="torch"):
        import unidist.torch  # noqa: F401


def test_unidist_comes_from_its_wheel_with_the_kernels_of_shm() -> None:
    packages = Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))
    for name in ("unidist", "unidist_tensorflow", "unidist_launch", "unidist.engines._shm"):
        found = importlib.util.find_spec(name)
        assert found is not None, name
        assert found.origin is not None, name
        assert any(Path(found.origin).is_relative_to(folder) for folder in packages), found.origin
    assert not Path(unidist.__file__).is_relative_to(ROOT / "unidist")


def test_the_command_says_what_is_missing_and_works_without() -> None:
    doctor = command("doctor")
    assert doctor.returncode == 0, doctor.stderr
    assert re.search(r"framework tensorflow\W+usable", doctor.stdout)
    assert re.search(r"framework torch\W+not usable: package 'torch' is not installed", doctor.stdout)
    plugins = command("plugins")
    assert (plugins.returncode, plugins.stderr) == (0, "")
    launched = command("launch", "-np", "2", "--engine", "shm", sys.executable, "-c", "print('started')")
    assert (launched.returncode, launched.stderr) == (0, "")
    assert "started" in launched.stdout


def test_two_ranks_train_to_equal_weights_and_nothing_asks_for_torch(
    rank_pool: Callable[..., RankPool],
) -> None:
    def on_rank() -> Any:
        import keras
        import numpy as np
        import tensorflow as tf

        import unidist.keras as ud

        ud.init()
        keras.utils.set_random_seed(ud.rank())  # the weights are rank 0's, the samples each rank's own
        x, y = np.random.normal(size=(32, 3)).astype("float32"), np.random.normal(size=(32, 1)).astype("float32")
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
        start = [weight.copy() for weight in model.get_weights()]
        model, optimizer = ud.distribute(model, keras.optimizers.Adam(0.01))
        model.compile(optimizer, "mse", jit_compile=False)
        history = model.fit(x, y, batch_size=8, epochs=3, verbose=0).history
        total = float(ud.allreduce(tf.constant(1.0), op=ud.Sum))
        ud.shutdown()
        asked = [name for name in sys.modules if name.partition(".")[0] == "torch"]
        return model.get_weights(), start, history["loss"], total, asked

    (weights, start, losses, total, asked), (others, _, other_losses, _, others_asked) = rank_pool(
        2, env=ENVIRONMENT
    ).run(on_rank)
    assert all((one == other).all() for one, other in zip(weights, others, strict=True))
    assert any((one != before).any() for one, before in zip(weights, start, strict=True))
    assert losses != other_losses  # they saw different samples, so the weights are equal by the exchange only
    assert total == 2
    assert asked == others_asked == []
