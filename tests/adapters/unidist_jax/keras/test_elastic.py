"""Keras on JAX on ranks that come and go: the weights are those of an undisturbed run, and nothing is traced again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from _keras_training import loss, network, runtime, samples, values
from elastic_job import ElasticJob
from part_pools import PartOfPool

import unidist.keras as ud

pytestmark = pytest.mark.parallel

ENVIRONMENT = {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", "UNIDIST_TIMEOUT_SEC": "60"}

# Every rank takes the same 6 samples whichever ranks there are, so a mean that counted lost ranks would show. After
# step 4 it waits until all ranks are there again, and while there is a file `hold`. Lines "traced" say how often this
# process has traced its step.
SCRIPT = """
import os, signal, sys, time
import keras, numpy as np
import unidist.keras as ud

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

ud.init()
wanted, how = int(sys.argv[1]), sys.argv[2]
worker = int(os.environ.get("UNIDIST_WORKER", 0))
keras.config.set_floatx("float64")
keras.utils.set_random_seed(3 if worker == 0 else 4)
traced = []

def loss_fn(y, out):
    traced.append("loss")
    return keras.ops.mean((y - out) ** 2, axis=-1)

layers = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dropout(0.2, seed=7), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((4,)), *layers])
averaging = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": None}
adam = keras.optimizers.Adam(0.05, **averaging)
if how == "step":
    step = ud.TrainStep(model, adam, loss_fn)
    optimizer = step.optimizer
else:
    model, optimizer = ud.distribute(model, adam)
    model.compile(optimizer, loss_fn, metrics=["mae"])
state = ud.elastic.KerasState(model, optimizer, batch=0)

class Happens(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if worker == 1 and state.batch == 2 and how in ("within", "step"):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)  # the others wait within their compiled step

    def on_train_batch_end(self, batch, logs=None):
        state.batch += 1
        say("step", state.batch, ud.rank())
        time.sleep(0.1)

class Waits(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        while state.batch == 4 and (ud.size() < wanted or os.path.exists("hold")):
            state.check_host_updates()
            time.sleep(0.01)

@ud.elastic.run
def train(state):
    say("enter", ud.rank(), ud.size(), state.batch, os.getpid())
    if how == "step":
        happens, waits = Happens(), Waits()
        while state.batch < 10:
            x = np.random.default_rng(100 + state.batch).standard_normal((6, 4))
            happens.on_train_batch_begin(state.batch)
            step(x, np.sin(x).sum(1, keepdims=True))
            happens.on_train_batch_end(state.batch)
            state.commit()
            waits.on_train_batch_end(state.batch)
        optimizer.finalize_variable_values(model.trainable_weights)
        return
    rest = [np.random.default_rng(100 + step).standard_normal((6, 4)) for step in range(state.batch, 10)]
    if rest:
        x = np.concatenate(rest)
        callbacks = [Happens(), ud.elastic.CommitStateCallback(state), Waits()]
        model.fit(x, np.sin(x).sum(1, keepdims=True), batch_size=6, shuffle=False, verbose=0, callbacks=callbacks)

train(state)
say("done", ";".join(repr(float(np.sum(weight))) for weight in model.get_weights()), state.batch, os.getpid())
say("traced", os.getpid(), len(traced))
"""


def weights(text: str) -> list[float]:
    return [float(item) for item in text.split(";")]


def undisturbed(folder: Path, how: str) -> tuple[list[float], int]:
    """Return the weights of one process that nothing happens to, and how often it has traced its step."""
    done = subprocess.run(
        [sys.executable, "script.py", "1", "step" if how == "step" else "undisturbed"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
    )
    words = [line.split() for line in done.stdout.splitlines()]
    [told] = [line[1] for line in words if line[0] == "done"]
    [traced] = [int(line[2]) for line in words if line[0] == "traced"]
    return weights(told), traced


@pytest.mark.parametrize(
    ("how", "victim"),
    [
        ("within", None),
        pytest.param("between", 0, marks=pytest.mark.soak),
        pytest.param("step", None, marks=pytest.mark.soak),
    ],
)
def test_a_killed_rank_is_replaced_and_the_others_compile_nothing_again(
    how: str, victim: int | None, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    if victim is not None:
        (tmp_path / "hold").touch()
    with ElasticJob.start(tmp_path, ["-np", "3", "--min-np", "1"], ["script.py", "3", how], ENVIRONMENT) as job:
        pids = {job.pid(rank, 3) for rank in range(3)}
        if victim is not None:
            killed = job.pid(victim, 3)
            job.wait_for(r"step 2 \d")
            os.kill(killed, signal.SIGKILL)
            (tmp_path / "hold").unlink()
        assert job.end(seconds=300) == 0, job.lines
    results = [weights(text) for (text,) in job.said(r"done (\S+) \d+ \d+")]
    assert len(results) == 3
    expected, traced = undisturbed(tmp_path, how)
    for result in results:
        assert result == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert [event["world_size"] for event in job.events("generation")] == [3, 2, 3]
    survivors = pids & job.survivors()
    assert len(survivors) == 2
    for pid, count in job.said(r"traced (\d+) (\d+)"):
        if int(pid) in survivors:
            assert int(count) == traced, job.lines


def test_callbacks_keep_the_state_and_restore_brings_it_back(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            model, optimizer = ud.distribute(network(), keras.optimizers.Adam(0.01))
            model.compile(optimizer, loss())
            state = ud.elastic.KerasState(model, batch=0, epoch=0)
            callbacks = [
                ud.elastic.UpdateBatchStateCallback(state),
                ud.elastic.UpdateEpochStateCallback(state),
                ud.elastic.CommitStateCallback(state, batches_per_commit=3),
            ]
            seen = []
            watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(state.batch))
            arrays = samples()
            model.fit(*arrays, batch_size=12, epochs=2, shuffle=False, verbose=0, callbacks=[*callbacks, watch])
            assert (seen, state.epoch, state.batch) == ([0, 1, 2, 3] * 2, 2, 0)
            before, steps = values(model), int(optimizer.iterations.numpy())
            for _ in range(2):  # the arrays of the last commit are used again
                model.fit(*arrays, batch_size=12, verbose=0)
                state.epoch = 5
                assert any((one != other).any() for one, other in zip(values(model), before, strict=True))
                state.restore()
                assert (state.epoch, int(optimizer.iterations.numpy())) == (2, steps)
                for one, other in zip(values(model), before, strict=True):
                    np.testing.assert_array_equal(one, other)

    two.run(on_rank)


def test_a_rank_that_joins_has_the_count_of_updates_of_the_others(two: PartOfPool) -> None:
    def on_rank() -> list[int]:
        with runtime():
            model, optimizer = ud.distribute(network(), keras.optimizers.Adam(0.01))
            state = ud.elastic.KerasState(model, optimizer)
            update = optimizer._unidist.distributed_update
            update.step = 7 * (1 - ud.rank())
            state.sync()
            found = [update.step]
            update.step = 9
            state.restore()
            return [*found, update.step]

    assert two.run(on_rank) == [[7, 7], [7, 7]]


@pytest.mark.soak
def test_zero_is_refused_in_an_elastic_job(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["-np", "1", "--min-np", "1", "--strategy", "zero=1"]
    with ElasticJob.start(tmp_path, options, ["script.py", "1", "undisturbed"], ENVIRONMENT) as job:
        assert job.end(seconds=120) != 0
    assert any("strategy 'zero' is not elastic with Keras on JAX" in line for line in job.lines), job.lines
