"""Keras on ranks that come and go: `fit` and a custom loop, with graphs that were traced in an earlier world."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from elastic_job import ElasticJob

# 8 steps of 12 samples each, for all ranks together. In step 4 it waits until all ranks are there again,
# and while there is a file `hold`.
COMMON = """
import os, sys, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, numpy as np, tensorflow as tf
import unidist.keras as ud
import unidist.tensorflow as udtf
import unidist_zero

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

ud.init()
keras.config.set_floatx("float64")
keras.utils.set_random_seed(4 + int(os.environ.get("UNIDIST_WORKER", 0)))  # others begin with other weights
if os.environ.get("UNIDIST_WORKER", "0") == "0":
    keras.utils.set_random_seed(4)
wanted, steps_per_commit = int(sys.argv[1]), int(sys.argv[2])
inputs = np.random.default_rng(1).normal(size=(96, 6))
targets = np.sin(inputs).sum(1, keepdims=True)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(1e-2)

def share(step):
    rows = slice(step * 12 + ud.rank(), step * 12 + 12, ud.size())
    return inputs[rows], targets[rows]

def wait_for_all(state):
    while state.batch == 4 and (ud.size() < wanted or os.path.exists("hold")):
        state.check_host_updates()
        time.sleep(0.01)

def end(state):
    with unidist_zero.gathered(model):
        weights = model.get_weights()
    say("done", ";".join(repr(float(w.sum())) for w in weights), state.batch, os.getpid())
"""
FIT = (
    COMMON
    + """
model, optimizer = ud.distribute(model, optimizer)
model.compile(optimizer=optimizer, loss="mse")
state = ud.elastic.KerasState(model, batch=0, epoch=0)

class Steps(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        wait_for_all(state)

    def on_train_batch_end(self, batch, logs=None):
        state.batch += 1
        say("step", state.batch, ud.rank())
        time.sleep(0.1)

@ud.elastic.run
def train(state):
    say("enter", ud.rank(), ud.size(), state.batch, os.getpid())
    rest = [share(step) for step in range(state.batch, 8)]
    if rest:
        data = tf.data.Dataset.from_generator(
            lambda: rest, output_signature=(tf.TensorSpec((None, 6), tf.float64), tf.TensorSpec((None, 1), tf.float64))
        )
        callbacks = [Steps(), ud.elastic.CommitStateCallback(state, steps_per_commit)]
        model.fit(data, epochs=1, steps_per_epoch=len(rest), verbose=0, callbacks=callbacks)

train(state)
end(state)
"""
)
LOOP = (
    COMMON
    + """
model, optimizer = ud.distribute(model, optimizer)
state = ud.elastic.KerasState(model, optimizer, batch=0)

@tf.function(reduce_retracing=True)
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return optimizer.iterations + 0

@udtf.elastic.run
def train(state):
    say("enter", ud.rank(), ud.size(), state.batch, os.getpid())
    while state.batch < 8:
        wait_for_all(state)
        count = step(*map(tf.constant, share(state.batch)))
        state.batch += 1
        assert int(count) == state.batch // steps_per_commit, (int(count), state.batch)
        say("step", state.batch, ud.rank())
        time.sleep(0.1)
        if state.batch % steps_per_commit == 0:
            state.commit()

train(state)
end(state)
"""
)
EAGER = LOOP.replace("@tf.function(reduce_retracing=True)\n", "")
OF_HOROVOD = "ud.DistributedOptimizer(optimizer)"
HOROVOD_FIT = FIT.replace("ud.distribute(model, optimizer)", f"model, {OF_HOROVOD}")
HOROVOD_LOOP = LOOP.replace(
    "model, optimizer = ud.distribute(model, optimizer)", "optimizer.build(model.trainable_variables)"
).replace("tf.GradientTape()", "udtf.DistributedGradientTape(tf.GradientTape())")


def parameters(text: str) -> list[float]:
    return [float(item) for item in text.split(";")]


def undisturbed(folder: Path, strategy: str, steps_per_commit: int) -> list[float]:
    """Return what one process computes that nothing happens to, where nothing is shared out."""
    alike = ",".join(part for part in strategy.split(",") if not part.startswith(("data", "zero")))
    alone = subprocess.run(
        [sys.executable, "script.py", "1", str(steps_per_commit)],
        env={**os.environ, "UNIDIST_STRATEGY": alike},
        capture_output=True, text=True, timeout=240, check=True, cwd=folder,
    )  # fmt: skip
    (line,) = [line for line in alone.stdout.splitlines() if line.startswith("done ")]
    return parameters(line.split()[1])


def start(size: int, strategy: str, steps_per_commit: int, folder: Path) -> ElasticJob:
    """Start the script of this folder as an elastic job."""
    options = ["-np", str(size), "--min-np", "1", "--strategy", strategy]
    return ElasticJob.start(folder, options, ["script.py", str(size), str(steps_per_commit)])


def soaking(*values: object, name: str) -> object:
    return pytest.param(*values, marks=pytest.mark.soak, id=name)


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("script", "size", "victim", "strategy"),
    [
        pytest.param(FIT, 2, 0, "zero=2,clip_norm=1", id="zero-fit-2"),
        soaking(FIT, 3, 1, "zero=1", name="zero-fit-3"),
        soaking(LOOP, 3, 2, "zero=2,accumulate=2,clip_norm=1", name="zero-loop-3"),
        soaking(LOOP, 3, 0, "zero=1:whole=true,accumulate=2", name="zero-whole-loop-3"),
        soaking(EAGER, 2, 1, "zero=2", name="zero-eager-2"),
        soaking(FIT, 3, 1, "zero=3,clip_norm=1", name="zero-3-fit-3"),
        soaking(LOOP, 2, 0, "zero=3:whole=true,accumulate=2", name="zero-3-whole-loop-2"),
        soaking(EAGER, 3, 0, "zero=3,accumulate=2", name="zero-3-eager-3"),
        soaking(HOROVOD_FIT, 2, 0, "data", name="fit-2"),
        soaking(HOROVOD_FIT, 3, 1, "data", name="fit-3"),
        soaking(HOROVOD_LOOP, 2, 1, "data", name="loop-2"),
    ],
)
def test_a_killed_rank_is_replaced_and_the_result_is_that_of_one_process(
    script: str, size: int, victim: int, strategy: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(script)
    steps_per_commit = 2 if "accumulate=2" in strategy else 1
    wanted = undisturbed(tmp_path, strategy, steps_per_commit)
    (tmp_path / "hold").touch()
    with start(size, strategy, steps_per_commit, tmp_path) as job:
        job.wait_for(rf"enter {size - 1} {size} .*", seconds=240)
        pids = {job.pid(rank, size) for rank in range(size)}
        killed = job.pid(victim, size)
        job.wait_for(r"step 2 \d", seconds=240)
        os.kill(killed, signal.SIGKILL)
        (tmp_path / "hold").unlink()
        assert job.end(seconds=240) == 0, job.lines
    results = [parameters(text) for (text,) in job.said(r"done (\S+) \d+ \d+")]
    assert len(results) == size
    for result in results:
        assert result == pytest.approx(wanted, rel=1e-12, abs=1e-12)
    assert pids - {killed} <= job.survivors()


@pytest.mark.parallel
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_are_killed_or_leave_at_random_steps_lose_no_share(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    size, strategy = chance.choice((2, 3)), chance.choice(("zero=1", "zero=2:whole=true", "zero=3"))
    (tmp_path / "script.py").write_text(chance.choice((FIT, LOOP)))
    wanted = undisturbed(tmp_path, strategy, 1)
    with start(size, strategy, 1, tmp_path) as job:
        for step in (chance.randrange(1, 4), chance.randrange(5, 8)):  # between the two, all ranks are there again
            job.wait_for(rf"step {step} \d", seconds=240)
            places = job.said(r"enter (\d+) (\d+) \d+ (\d+)")
            pid = chance.choice([int(pid) for _, count, pid in places if int(count) == size][-size:])
            time.sleep(chance.random() * 0.1)
            os.kill(pid, chance.choice((signal.SIGKILL, signal.SIGTERM)))
        assert job.end(seconds=300) == 0, job.lines
    results = [parameters(text) for (text,) in job.said(r"done (\S+) \d+ \d+")]
    assert len(results) >= size - 1
    for result in results:
        assert result == pytest.approx(wanted, rel=1e-12, abs=1e-12)


@pytest.mark.parallel
@pytest.mark.soak
def test_neighbours_that_are_lost_together_end_the_job_with_an_error_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LOOP)
    with start(3, "zero=2", 1, tmp_path) as job:
        victims = [job.pid(rank, 3) for rank in (1, 2)]
        job.wait_for(r"step 2 \d", seconds=240)
        for victim in victims:
            os.kill(victim, signal.SIGSTOP)  # so that neither is replaced before the other is gone
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        assert job.end(seconds=300) != 0
    assert any("the share of rank 1 by rank 2" in line for line in job.lines), job.lines
    assert not job.said(r"done .*")
