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
import ssh_hosts
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


def test_unidist_comes_from_its_wheel_with_its_c_code() -> None:
    packages = Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))
    for name in ("unidist", "unidist_tensorflow", "unidist_launch", "unidist.engines._shm", "unidist_tcp._tcp"):
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
        return model.get_weights(), start, x, history["loss"], total, asked

    (weights, start, x, losses, total, asked), (others, _, other_x, other_losses, _, others_asked) = rank_pool(
        2, env=ENVIRONMENT
    ).run(on_rank)
    assert all((one == other).all() for one, other in zip(weights, others, strict=True))
    assert any((one != before).any() for one, before in zip(weights, start, strict=True))
    assert (x != other_x).any()  # they saw different samples, so the weights are equal by the exchange only
    assert losses == other_losses  # the mean over the ranks
    assert total == 2
    assert asked == others_asked == []


_ON_TWO_HOSTS = """
import sys
import keras
import numpy as np
import tensorflow as tf
import unidist.keras as ud

ud.init()
assert (ud.size(), ud.local_size(), ud.cross_size()) == (4, 2, 2)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(48, 3)), rng.normal(size=(48, 1))


def fit(x, y, batch_size, distributed):
    keras.utils.set_random_seed(0)
    keras.backend.set_floatx("float64")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    if distributed:
        model, optimizer = ud.distribute(model, optimizer)
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


mine = np.concatenate([np.arange(12 * i + 3 * ud.rank(), 12 * i + 3 * ud.rank() + 3) for i in range(4)])
alone, together = fit(x, y, 12, False), fit(x[mine], y[mine], 3, True)
left_out = fit(x[mine], y[mine], 3, False)
print("as one process:", bool(abs(together - alone).max() < 1e-12))
print("without exchange:", bool(abs(left_out - alone).max() > 1e-6))
large = tf.range(1_000_000, dtype=tf.float64) * (ud.rank() + 1)
print("large sum:", bool((ud.allreduce(large, op=ud.Sum).numpy() == 10.0 * np.arange(1_000_000)).all()))
print("torch:", [name for name in sys.modules if name.partition(".")[0] == "torch"])
ud.shutdown()
"""


@pytest.mark.skipif(bool(ssh_hosts.why_not()), reason=ssh_hosts.why_not() or "hosts can be made")
def test_tensorflow_trains_on_two_hosts_over_tcp(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_ON_TWO_HOSTS)
    variables = [item for name, value in ENVIRONMENT.items() for item in ("--env", f"{name}={value}")]
    with ssh_hosts.SshHosts(2) as hosts:
        job = ("launch", "-np", "4", "-H", "h1:2,h2:2", "--ssh-command", hosts.ssh_command, "--log-level", "info")
        done = command(*job, *variables, sys.executable, str(script))
    assert done.returncode == 0, done.stderr
    assert "engine tcp for host memory: the first choice for 4 rank(s) on 2 host(s)" in done.stderr
    assert "tcp between 2 hosts, shm inside, ranks 0-3" in done.stderr
    said = {line.partition("] ")[2] for line in done.stdout.splitlines()}  # equal lines of several ranks are folded
    assert said == {"as one process: True", "without exchange: True", "large sum: True", "torch: []"}, done.stdout
