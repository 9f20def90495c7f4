"""Elastic jobs go on with their store: no acknowledged push is lost or applied twice, though commits are older."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic_job import ElasticJob

pytestmark = pytest.mark.parallel

_TORCH = """
import torch
import unidist.torch as ud
from unidist.torch import barrier

ud.init()
weights = torch.nn.Parameter(torch.zeros(64, dtype=torch.float64))
model = torch.nn.ParameterList([weights])
model, optimizer = ud.distribute(model, torch.optim.SGD([weights], lr=1.0))
state = ud.elastic.TorchState(model, optimizer, step=0, generation=0)

def push(gradient):
    optimizer.zero_grad()
    (weights * torch.tensor(gradient)).sum().backward()
    optimizer.step()

def values():
    return weights.detach().tolist()
"""
_KERAS = """
import keras
import tensorflow as tf
import unidist.keras as ud
from unidist.tensorflow import barrier

ud.init()
keras.config.set_floatx("float64")
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
model, optimizer = ud.distribute(model, keras.optimizers.SGD(1.0))
state = ud.elastic.KerasState(model, optimizer, step=0, generation=0)

@tf.function
def update(gradient):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(gradient))
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

def push(gradient):
    update(tf.constant(gradient[None]))

def values():
    return model.get_weights()[0].ravel().tolist()
"""
# Gradients are integers, and each has a key: so the sum of all that were acknowledged is exact in any order.
_TRAIN = """
import os, signal, sys, time
import numpy as np

def gradient(key):
    return np.random.default_rng(key).integers(-1000, 1000, 64).astype(float)

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

is_sync = sys.argv[1] == "sync"
pushed = 0

@ud.elastic.run
def train(state):
    global pushed
    say("enter", ud.rank(), ud.size(), state.step)
    state.generation += 1
    while state.step < 40:
        if state.step == 15 and ud.rank() == 1 and state.generation == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while state.step == 30 and ud.size() < 3:
            state.check_host_updates()
            time.sleep(0.01)
        key = 1000 * state.step + ud.rank() if is_sync else 100000 * (os.getpid() % 10000) + pushed
        push(gradient(key))
        pushed += 1
        say("pushed", key)
        state.step += 1
        if state.step % 6 == 0:
            state.commit()

train(state)
barrier()
push(np.zeros(64))
say("done", values())
"""


_SCRIPTS = {"torch": _TORCH, "keras": _KERAS}


def _run(folder: Path, framework: str, options: str, mode: str) -> ElasticJob:
    """Run a job of three ranks, of which one is killed and replaced later."""
    pytest.importorskip("torch" if framework == "torch" else "tensorflow")
    (folder / "script.py").write_text(_SCRIPTS[framework] + _TRAIN)
    line = f"parameter_server={options}:shard_size=64B"
    with ElasticJob.start(folder, ["-np", "3", "--min-np", "2", "--strategy", line], ["script.py", mode]) as job:
        assert job.end(seconds=150) == 0, job.lines
    assert len({size for _, size, _ in job.said(r"enter (\d) (\d) (\d+)")}) == 2, "it was smaller for a while"
    return job


def _gradient(key: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(key).integers(-1000, 1000, 64).astype(float)


def _found(job: ElasticJob) -> list[list[float]]:
    found = [ast.literal_eval(text) for (text,) in job.said(r"done (.*)")]
    assert len(found) == 3, job.lines
    return found


@pytest.mark.parametrize(
    ("framework", "options"),
    [
        pytest.param("torch", "async:scale=none", marks=pytest.mark.soak),
        ("torch", "async:scale=none:servers=2"),
        pytest.param("keras", "async:scale=none", marks=pytest.mark.soak),
        pytest.param("keras", "async:scale=none:servers=2", marks=pytest.mark.soak),
    ],
)
def test_no_acknowledged_push_is_lost_with_a_worker(tmp_path: Path, framework: str, options: str) -> None:
    job = _run(tmp_path, framework, options, "async")
    keys = [int(key) for (key,) in job.said(r"pushed (\d+)")]
    assert len(keys) == len(set(keys)) > 100
    expected = -sum(_gradient(key) for key in keys)
    for values in _found(job):
        assert np.array_equal(values, expected)


@pytest.mark.parametrize("framework", ["torch", pytest.param("keras", marks=pytest.mark.soak)])
def test_synchronous_steps_go_on_from_the_commit(tmp_path: Path, framework: str) -> None:
    job = _run(tmp_path, framework, "sync", "sync")
    # Generations begin at 0 with 3 ranks, at the commit of 12 with 2, and at 30 with 3 again.
    sizes = [3] * 12 + [2] * 18 + [3] * 10
    expected = np.zeros(64)
    for step, size in enumerate(sizes):
        expected -= sum(_gradient(1000 * step + rank) for rank in range(size)) / size
    for values in _found(job):
        assert np.abs(np.array(values) - expected).max() < 1e-9
