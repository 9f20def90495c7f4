"""Elastic jobs whose Keras model is cut over ranks: a rank is killed, and the numbers are those of one process."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from _keras_training import runtime
from elastic_job import ElasticJob

pytestmark = pytest.mark.parallel

SPARE = ("--spares", "1")
LOST_AT = 5
"""Updates that are done when a worker is killed, between forward and backward pass of the next one."""
STEPS = 18
"""Of 8 samples, and of one at the end of each of 3 epochs."""

NETWORK = """
import keras, numpy as np

COUNT, BATCH, EPOCHS = 41, 8, 3  # the last batch of an epoch has one sample: a replica has none
INPUTS = np.random.default_rng(1).normal(size=(COUNT, 8))
TARGETS = np.sin(INPUTS).sum(1, keepdims=True)

def network(dropout=0.0):
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dropout(dropout), keras.layers.Dense(12)]
    return keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dropout(dropout), keras.layers.Dense(1)])
"""
COMMON = (
    """
import json, os, signal, sys, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
"""
    + NETWORK
    + """
import tensorflow as tf
import unidist.keras as ud

keras.config.set_floatx("float64")
options = json.loads(sys.argv[1])
worker = int(os.environ.get("UNIDIST_WORKER", 0))

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

class Dies(keras.optimizers.Adam):
    def scale_loss(self, loss):
        def look(step):
            if worker == options["victim"] and step == options["at"]:
                say("dies", time.time())
                os.kill(os.getpid(), signal.SIGKILL)
            return step
        with tf.control_dependencies([tf.numpy_function(look, [self.iterations.value], tf.int64)]):
            return super().scale_loss(tf.identity(loss))

def done(step):
    say("step", step, ud.rank(), ud.size(), os.getpid(), time.time())
    while step == options["at"] and not os.path.exists("go"):
        time.sleep(0.01)

ud.init()
model = network(options.get("dropout", 0.0))
if worker:
    model.set_weights([each + 1 for each in model.get_weights()])
model, optimizer = ud.distribute(model, Dies(1e-2))
"""
)
FIT = (
    COMMON
    + """
class Watch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        done(int(optimizer.iterations))

model.compile(optimizer, "mse")
samples = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS))
data = ud.shard(samples, batch_size=BATCH // 2, shuffle=False).prefetch(1)
model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[Watch()])
"""
)
LOOP = (
    COMMON
    + """
state = ud.elastic.KerasState(model, optimizer, batch=0)

@tf.function(reduce_retracing=True)
def step(x, y, weight):
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(weight * tf.reduce_sum((model(x, training=True) - y) ** 2))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

@ud.elastic.run
def train(state):
    place, size = ud.rank() // 2, ud.size() // 2
    while state.batch < 18:
        epoch = np.arange(COUNT)[state.batch % 6 * BATCH :][:BATCH]
        rows = epoch[place::size]
        step(INPUTS[rows], TARGETS[rows], tf.constant(size / len(epoch), tf.float64))
        state.batch += 1
        state.commit()
        done(state.batch)

train(state)
"""
)
BATCHES = (
    COMMON
    + """
model.compile(optimizer, "mse")
state = ud.elastic.KerasState(model, optimizer, batch=0)

@ud.elastic.run
def train(state):
    size = ud.size() // 2
    place = ud.rank() % size  # the replicas of a stage stand side by side
    while state.batch < 18:
        epoch = np.arange(COUNT)[state.batch % 6 * BATCH :][:BATCH]
        rows = epoch[place::size]
        rows, weight = (rows, len(rows) * size / len(epoch)) if len(rows) else (epoch[:1], 0.0)
        model.train_on_batch(INPUTS[rows], TARGETS[rows], sample_weight=np.full(len(rows), weight))
        state.batch += 1
        state.commit()
        done(state.batch)

train(state)
"""
)
SCRIPTS = {"fit": FIT, "loop": LOOP, "batches": BATCHES}
END = """
ud.save("final", model=model, optimizer=optimizer)
seeds = [each.numpy().tolist() for each in model.variables if "seed_generator" in each.path]
say("done", ud.rank(), os.getpid(), int(optimizer.iterations), json.dumps(seeds))
"""


def start(
    folder: Path, script: str, launch: tuple[str, ...], *, victim: int, size: int = 4, **options: Any
) -> ElasticJob:
    """Start a script on two replicas, and kill one of the ranks; with a spare, that stands by then."""
    (folder / "script.py").write_text(script + END)
    job = ElasticJob.start(
        folder,
        ["-np", str(size), "--min-np", str(size // 2), *launch],
        ["script.py", json.dumps({"victim": victim, "at": LOST_AT, **options})],
        {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while launch[-2:] == SPARE and not job.events("standby") and time.monotonic() < deadline:
        time.sleep(0.05)
    (folder / "go").touch()
    return job


def check_numbers(folder: Path) -> None:
    """Check that weights and optimizer, as the job has saved them, are those of Keras alone."""
    import unidist.keras as ud

    made: dict[str, Any] = {}
    exec(NETWORK, made)
    with runtime("float64"):
        model = made["network"]()
        optimizer = keras.optimizers.Adam(1e-2)
        model.compile(optimizer, "mse")
        model.fit(made["INPUTS"], made["TARGETS"], batch_size=8, epochs=3, shuffle=False, verbose=0)
        wanted = [np.array(each) for each in (*model.weights, *optimizer.variables)]
        other = made["network"]()
        again = keras.optimizers.Adam(1e-2)
        again.build(other.trainable_variables)
        ud.load(folder / "final", model=other, optimizer=again)
        found = [np.array(each) for each in (*other.weights, *again.variables)]
    for one, two in zip(wanted, found, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-12, atol=1e-12)


def check_survivors(job: ElasticJob, *, size: int) -> None:
    """Check that no process that survived was started again, and that those in the next step are the right ones."""
    assert len(job.events("lost")) == 1
    before, after = job.events("generation")
    assert after["world_size"] == size
    started = {event["worker"]: event["pid"] for event in job.events("process")}
    assert max(after["workers"]) <= before["world_size"]  # nobody was replaced but the lost one, by the spare
    steps = job.said(rf"step {LOST_AT + 1} (\d+) \d+ (\d+) \S+")
    assert {int(rank): int(pid) for rank, pid in steps} == {
        rank: started[worker] for rank, worker in enumerate(after["workers"])
    }
    assert {int(count) for (count,) in job.said(r"done \d+ \d+ (\d+) .*")} == {STEPS}


def soaking(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("script", "strategy", "victim", "launch"),
    [
        ("fit", "tensor=2", 1, SPARE),
        ("fit", "pipeline=2", 3, SPARE),
        soaking("fit", "pipeline=2", 1, ()),
        *(soaking("fit", "pipeline=2", victim, SPARE) for victim in (0, 1, 2)),
        soaking("fit", "pipeline=2:schedule=gpipe:microbatches=3,zero=1", 0, SPARE),
        soaking("fit", "pipeline=2,zero=2", 2, ()),
        *(soaking("fit", "pipeline=2,tensor=2", victim, SPARE) for victim in (1, 6)),
        *(soaking("batches", "pipeline=2", victim, launch) for victim, launch in ((1, SPARE), (2, ()))),
        soaking("loop", "tensor=2", 2, ()),
        *(soaking(script, "tensor=2", victim, SPARE) for script in ("fit", "loop") for victim in (0, 3)),
        soaking("fit", "tensor=2", 2, ()),
        soaking("fit", "tensor=2,zero=1", 2, ()),
        soaking("fit", "tensor=2,zero=2", 0, SPARE),
        soaking("loop", "tensor=2,zero=2", 3, SPARE),
    ],
)
def test_a_rank_is_lost_and_the_numbers_are_those_of_one_process(
    script: str, strategy: str, victim: int, launch: tuple[str, ...], tmp_path: Path
) -> None:
    size = 8 if "pipeline" in strategy and "tensor" in strategy else 4
    with start(tmp_path, SCRIPTS[script], ("--strategy", strategy, *launch), victim=victim, size=size) as job:
        assert job.end(seconds=300) == 0, job.lines
    check_survivors(job, size=size if launch else size // 2)
    check_numbers(tmp_path)


@pytest.mark.soak
def test_a_rank_that_joins_draws_the_numbers_of_its_replica(tmp_path: Path) -> None:
    """Dropout after the row layer is on all ranks of a replica; that between column and row on a part of each."""
    launch = ("--strategy", "tensor=2", *SPARE)
    with start(tmp_path, FIT, launch, victim=1, dropout=0.25) as job:
        assert job.end(seconds=300) == 0, job.lines
    said = {int(rank): json.loads(seeds) for rank, seeds in job.said(r"done (\d+) \d+ \d+ (.*)")}
    for first in (0, 2):
        (part, whole), (other_part, other_whole) = said[first], said[first + 1]
        assert whole == other_whole
        assert part[0] != other_part[0]
        assert part[1] == other_part[1]


@pytest.mark.soak
def test_a_rank_that_joins_a_pipeline_has_drawn_as_many_numbers_as_the_same_stage_of_the_other(tmp_path: Path) -> None:
    with start(tmp_path, FIT, ("--strategy", "pipeline=2", *SPARE), victim=3, dropout=0.25) as job:
        assert job.end(seconds=300) == 0, job.lines
    [(lost,)] = job.said(r"dies (\S+)")
    back = [float(at) for (at,) in job.said(rf"step {LOST_AT + 1} \d+ \d+ \d+ (\S+)")]
    assert max(back) - float(lost) < 4  # a rank that waits for the end of its last iterator takes 5 s and more
    said = {int(rank): json.loads(seeds) for rank, seeds in job.said(r"done (\d+) \d+ \d+ (.*)")}
    assert sorted(said) == [0, 1, 2, 3]
    for one, other in ((0, 1), (2, 3)):
        assert said[one], "a stage without dropout"
        assert said[one] == said[other]  # the script gives all ranks the same seed
