"""Keras on ranks that come and go: `fit` and a custom loop, with graphs that were traced in an earlier world."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_job import ElasticJob

# 8 steps of 12 samples each, for all ranks together. In step 3 it waits until all ranks are there again.
COMMON = """
import os, sys, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, numpy as np, tensorflow as tf
import unidist.keras as ud
import unidist.tensorflow as udtf

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

ud.init()
keras.config.set_floatx("float64")
keras.utils.set_random_seed(4 + int(os.environ.get("UNIDIST_WORKER", 0)))  # others begin with other weights
if os.environ.get("UNIDIST_WORKER", "0") == "0":
    keras.utils.set_random_seed(4)
wanted = int(sys.argv[1])
inputs = np.random.default_rng(1).normal(size=(96, 6))
targets = np.sin(inputs).sum(1, keepdims=True)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(1e-2)

def share(step):
    rows = slice(step * 12 + ud.rank(), step * 12 + 12, ud.size())
    return inputs[rows], targets[rows]

def wait_for_all(state):
    while state.batch == 3 and ud.size() < wanted:
        state.check_host_updates()
        time.sleep(0.01)

def end(state):
    say("done", ";".join(repr(float(w.sum())) for w in model.get_weights()), state.batch, os.getpid())
"""
FIT = (
    COMMON
    + """
model.compile(optimizer=ud.DistributedOptimizer(optimizer), loss="mse")
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
        callbacks = [Steps(), ud.elastic.CommitStateCallback(state)]
        model.fit(data, epochs=1, steps_per_epoch=len(rest), verbose=0, callbacks=callbacks)

train(state)
end(state)
"""
)
LOOP = (
    COMMON
    + """
optimizer.build(model.trainable_variables)
state = ud.elastic.KerasState(model, optimizer, batch=0)

@tf.function(reduce_retracing=True)
def step(x, y):
    with udtf.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

@udtf.elastic.run
def train(state):
    say("enter", ud.rank(), ud.size(), state.batch, os.getpid())
    while state.batch < 8:
        wait_for_all(state)
        step(*map(tf.constant, share(state.batch)))
        state.batch += 1
        say("step", state.batch, ud.rank())
        time.sleep(0.1)
        state.commit()

train(state)
end(state)
"""
)


def parameters(text: str) -> list[float]:
    return [float(item) for item in text.split(";")]


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("script", "size", "victim"), [(FIT, 2, 0), pytest.param(LOOP, 2, 1, marks=pytest.mark.soak),
                                   pytest.param(FIT, 3, 1, marks=pytest.mark.soak)],
    ids=["fit-2", "loop-2", "fit-3"],
)  # fmt: skip
def test_a_killed_rank_is_replaced_and_the_result_is_that_of_one_process(
    script: str, size: int, victim: int, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(script)
    alone = subprocess.run(
        [sys.executable, "script.py", "1"], capture_output=True, text=True, timeout=240, check=True, cwd=tmp_path
    )
    (line,) = [line for line in alone.stdout.splitlines() if line.startswith("done ")]
    command = [sys.executable, "-m", "unidist_launch", "launch", "-np", str(size), "--min-np", "1"]
    process = subprocess.Popen(
        [*command, "--event-log", "events", sys.executable, "script.py", str(size)],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with ElasticJob(process, tmp_path / "events") as job:
        job.wait_for(rf"enter {size - 1} {size} .*", seconds=240)
        pids = {job.pid(rank, size) for rank in range(size)}
        killed = job.pid(victim, size)
        job.wait_for(r"step 2 \d", seconds=240)
        os.kill(killed, signal.SIGKILL)
        assert job.end(seconds=240) == 0, job.lines
    results = [parameters(text) for (text,) in job.said(r"done (\S+) \d+ \d+")]
    assert len(results) == size
    for result in results:
        assert result == pytest.approx(parameters(line.split()[1]), rel=1e-12, abs=1e-12)
    assert pids - {killed} <= job.survivors()
