"""`model.fit` on JAX, on ranks that come and go, without a line for it: the numbers of Keras alone, on all samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from elastic_job import ElasticJob

pytestmark = pytest.mark.parallel

ENVIRONMENT = {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", "UNIDIST_TIMEOUT_SEC": "60"}

# 3 steps of 8 samples in an epoch; of 21 samples the last has 5, which 2 ranks do not share evenly. Worker 1 is lost in
# the middle of a step. While ranks are missing the others go slowly, so that a replacement comes in time.
SCRIPT = """
import json, os, signal, sys, time
import jax, keras, numpy as np
import unidist.keras as ud

keras.config.set_floatx("float64")
options = json.loads(sys.argv[1])
INPUTS = np.random.default_rng(1).normal(size=(options.get("count", 24), 6))
TARGETS = np.sin(INPUTS).sum(1, keepdims=True)
worker = int(os.environ.get("UNIDIST_WORKER", 0))
traced = []

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def look(step):
    if worker == 1 and step == options.get("kill"):
        os.kill(os.getpid(), signal.SIGKILL)

class Sees(keras.optimizers.Adam):
    def scale_loss(self, loss):
        traced.append(1)
        jax.debug.callback(look, self.iterations.value)
        return super().scale_loss(loss)

class Watch(keras.callbacks.Callback):
    batches, seen = 0, []
    def on_train_begin(self, logs=None):
        say("enter", ud.rank(), ud.size(), 0, os.getpid())
    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        while ud.size() < options["wanted"] and not os.path.exists("joined"):
            time.sleep(0.01)
        if ud.size() < options["wanted"]:
            time.sleep(0.1)  # the news of it are on their way
    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(round(logs["loss"], 6))
        if epoch == options.get("ends") and worker == 0:
            self.model.stop_training = True

keras.utils.set_random_seed(4)
layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.0, seed=3), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((6,)), *layers])
optimizer = Sees(1e-2, use_ema=options.get("ema", False), ema_momentum=0.5)
settings = {"metrics": ["mae"], "steps_per_execution": options.get("per_call", 1)}
if options.get("alone"):
    model.compile(optimizer, "mse", **settings)
    model.fit(INPUTS, TARGETS, batch_size=8, epochs=options["epochs"], shuffle=False, verbose=0)
else:
    ud.init()
    if worker:
        model.set_weights([each + 1 for each in model.get_weights()])
    policy = ud.elastic.Policy(commit_every=options.get("commit_every", 1))
    model, optimizer = ud.distribute(model, optimizer, elastic=policy)
    model.compile(optimizer, "mse", **settings)
    data = ud.shard((INPUTS, TARGETS), batch_size=4, shuffle=False)
    callbacks = [ud.callbacks.MetricAverageCallback(), Watch()]
    history = model.fit(data, epochs=options["epochs"], verbose=0, callbacks=callbacks)
    say("history", *history.epoch, "losses", *Watch.seen)
say("done", ";".join(repr(float(each.sum())) for each in model.get_weights()), int(optimizer.iterations.numpy()),
    os.getpid())
say("traced", os.getpid(), len(traced))
"""


def sums(text: str) -> list[float]:
    return [float(item) for item in text.split(";")]


def of_keras_alone(folder: Path, options: dict[str, Any]) -> list[float]:
    """Return the sums of the weights that one process comes to, without unidist."""
    done = subprocess.run(
        [sys.executable, "script.py", json.dumps({**options, "alone": True, "kill": -1})],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("done ")]
    return sums(line.split()[1])


@pytest.mark.parametrize(
    "options",
    [
        {"kill": 4, "epochs": 4, "ema": True},
        pytest.param({"kill": 4, "epochs": 4, "commit_every": 2}, marks=pytest.mark.soak),
        pytest.param({"kill": 3, "epochs": 4, "per_call": 2}, marks=pytest.mark.soak),
        pytest.param({"kill": 5, "epochs": 4, "count": 21}, marks=pytest.mark.soak),
    ],
    ids=["averages", "seldom commits", "two steps per call", "uneven"],
)
def test_fit_goes_on_when_a_rank_is_lost_in_a_step(tmp_path: Path, options: dict[str, Any]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = ["script.py", json.dumps({**options, "wanted": 2})]
    with ElasticJob.start(tmp_path, ["-np", "2", "--min-np", "1"], arguments, ENVIRONMENT) as job:
        job.wait_for_event("joined", 3)
        (tmp_path / "joined").touch()
        assert job.end(seconds=300) == 0, job.lines
    results = job.said(r"done (\S+) (\d+) (\d+)")
    assert len(results) == 2, job.lines
    wanted = of_keras_alone(tmp_path, options)
    for weights, steps, _ in results:
        assert sums(weights) == pytest.approx(wanted, rel=1e-12, abs=1e-12)
        assert int(steps) == 3 * options["epochs"]
    assert [event["world_size"] for event in job.events("generation")] == [2, 1, 2]
    first = {pid for (pid,) in job.said(r"enter \d 2 0 (\d+)")[:2]}
    traced = {pid: int(count) for pid, count in job.said(r"traced (\d+) (\d+)")}
    # It goes on with the program that it had; one more for each other number of samples in a micro-batch.
    assert [traced[pid] for pid in first & traced.keys()] == [3 if "count" in options else 1]


@pytest.mark.soak
def test_one_rank_ends_training_on_all(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = ["script.py", json.dumps({"epochs": 5, "ends": 1, "wanted": 2})]
    with ElasticJob.start(tmp_path, ["-np", "2", "--min-np", "1"], arguments, ENVIRONMENT) as job:
        assert job.end(seconds=300) == 0, job.lines
    assert [found[0].strip() for found in job.said(r"history ((?:\d+ )+)losses.*")] == ["0 1", "0 1"]
