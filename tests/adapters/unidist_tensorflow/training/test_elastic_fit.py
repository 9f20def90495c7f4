"""`model.fit` on ranks that come and go, without a line for it: the numbers of Keras alone, on all the samples."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from _keras_training import runtime
from elastic_job import ElasticJob

import unidist.keras as ud
from unidist.elastic.batches import Position, SampleOrder
from unidist.elastic.step_training import Progress
from unidist.jobs.pool.pool import RankPool
from unidist_tensorflow.elastic.data import ElasticDataset, elastic_dataset_of

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel

NETWORK = """
import keras, numpy as np

COUNT, EPOCHS = 46, 4
INPUTS = np.random.default_rng(1).normal(size=(COUNT, 6))
TARGETS = np.sin(INPUTS).sum(1, keepdims=True)

def network():
    keras.utils.set_random_seed(4)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])

def texts(weights):
    return ";".join(repr(float(each.sum())) for each in weights)
"""
# 4 steps of 12 samples in an epoch; the last has 10, which 3 ranks do not share evenly. Worker 1 is lost in the middle
# of a step. While ranks are missing the others go slowly, so that a replacement comes in time.
SCRIPT = (
    """
import json, os, signal, sys, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
"""
    + NETWORK
    + """
import tensorflow as tf
import unidist.keras as ud
import unidist_zero

keras.config.set_floatx("float64")
options = json.loads(sys.argv[1])
worker = int(os.environ.get("UNIDIST_WORKER", 0))

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

class Sees(keras.optimizers.Adam):
    def scale_loss(self, loss):
        def look(step):
            if worker == 1 and step == options["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return step
        with tf.control_dependencies([tf.numpy_function(look, [self.iterations.value], tf.int64)]):
            return super().scale_loss(tf.identity(loss))

class Watch(keras.callbacks.Callback):
    batches, sizes = 0, set()
    def on_train_begin(self, logs=None):
        self.began = ud.size()
        say("enter", ud.rank(), ud.size(), 0, os.getpid())
    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        say("batch", worker, self.batches, ud.size())
        while options["kill"] >= 0 and ud.size() < options["wanted"] and not os.path.exists("joined"):
            time.sleep(0.01)
        if ud.size() < options["wanted"] and self.batches < options["slow"]:
            time.sleep(options["pace"])

class EndsAt(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == options.get("ends") and worker == 0:
            self.model.stop_training = True

ud.init()
model = network()
if worker:
    model.set_weights([each + 1 for each in model.get_weights()])
policy = ud.elastic.Policy(commit_every=options.get("commit_every", 1), global_batch=options.get("batch", "keep"))
model, optimizer = ud.distribute(model, Sees(1e-2), elastic=policy)
model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=options.get("per_call", 1),
              run_eagerly=options.get("eager", False))
samples = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS))
data = ud.shard(samples, batch_size=options.get("batch_size", 4), shuffle=False).prefetch(1)
callbacks = [Watch(), ud.callbacks.MetricAverageCallback(), EndsAt()]
history = model.fit(data, epochs=options["epochs"], verbose=0, callbacks=callbacks)
if options.get("again"):
    model.fit(data, epochs=1, verbose=0)
with unidist_zero.gathered(model):
    weights = model.get_weights()
say("done", texts(weights), int(optimizer.iterations), os.getpid(), *history.epoch)
"""
)


def start(
    folder: Path, *, size: int = 3, strategy: str = "data", launch: tuple[str, ...] = (), **options: Any
) -> ElasticJob:
    """Start the script as an elastic job."""
    (folder / "script.py").write_text(SCRIPT)
    options = {"kill": -1, "wanted": 1, "epochs": 4, "pace": 0.5, "slow": 40} | options
    environment = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    ranks = ["-np", str(size), "--min-np", "1", "--strategy", strategy, *launch]
    return ElasticJob.start(folder, ranks, ["script.py", json.dumps(options)], environment)


def of_keras_alone(epochs: int, *, batch_size: int = 12) -> list[float]:
    """Return the sums of the weights that one process comes to, without unidist."""
    made: dict[str, Any] = {}
    exec(NETWORK, made)
    with runtime("float64"):
        model = made["network"]()
        model.compile(keras.optimizers.Adam(1e-2), "mse")
        model.fit(made["INPUTS"], made["TARGETS"], batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
        return [float(each.sum()) for each in model.get_weights()]


def check_weights(job: ElasticJob, epochs: int) -> list[tuple[str, ...]]:
    """Check that every rank came to the numbers of Keras alone; returns what the ranks said."""
    results = job.said(r"done (\S+) (\d+) (\d+)((?: \d+)*)")
    assert results, job.lines
    wanted = of_keras_alone(epochs)
    for weights, steps, *_ in results:
        assert [float(item) for item in weights.split(";")] == pytest.approx(wanted, rel=1e-12, abs=1e-12)
        assert int(steps) == 4 * epochs
    return results


def soaking(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.soak)


# A loss in the first step of an epoch makes all ranks go through the end of the one before once more.
@pytest.mark.parametrize(
    ("strategy", "kill", "options"),
    [
        ("data", 6, {}),
        soaking("data", 0, {}),
        soaking("data", 8, {}),
        soaking("data", 6, {"commit_every": 3}),
        soaking("data", 6, {"per_call": 3}),
        soaking("data", 6, {"eager": True}),
        soaking("accumulate=2", 6, {"batch_size": 2}),
        soaking("zero=2", 7, {}),
        soaking("zero=3", 6, {}),
        soaking("zero=3,clip_norm=0.5", 6, {"commit_every": 2}),
    ],
)
def test_fit_goes_on_when_a_rank_is_lost_in_a_step(
    strategy: str, kill: int, options: dict[str, Any], tmp_path: Path
) -> None:
    epochs = 12
    with start(tmp_path, strategy=strategy, kill=kill, wanted=3, epochs=epochs, pace=0.1, **options) as job:
        job.wait_for_event("joined", 4)
        (tmp_path / "joined").touch()
        assert job.end(seconds=300) == 0, job.lines
    if "clip" not in strategy:
        results = check_weights(job, epochs)
        assert len(results) == 3
        assert sum(epoch.split() == [str(i) for i in range(epochs)] for *_, epoch in results) == 2  # survivors saw all
    else:
        assert len({weights for weights, *_ in job.said(r"done (\S+) (\d+) .*")}) == 1
    assert len(job.events("lost")) == 1
    first = {int(pid) for (pid,) in job.said(r"enter \d 3 0 (\d+)")[:3]}
    assert len(first & {int(pid) for (pid,) in job.said(r"done \S+ \d+ (\d+).*")}) == 2  # processes that stayed


def test_all_ranks_stop_where_a_callback_of_one_does_and_train_on_together(tmp_path: Path) -> None:
    with start(tmp_path, size=2, launch=("--checkpoint-dir", "saved"), epochs=4, ends=1, again=True) as job:
        assert job.end(seconds=300) == 0, job.lines
    assert {tuple(epochs.split()) for *_, epochs in job.said(r"done (\S+) (\d+) (\d+)((?: \d+)*)")} == {("0", "1")}
    assert {steps for _, steps, *_ in job.said(r"done (\S+) (\d+) (\d+)((?: \d+)*)")} == {"18"}
    assert job.events("checkpoint")  # of the end, at least


@pytest.mark.soak
def test_a_job_that_was_killed_goes_on_in_the_middle_of_its_epoch(tmp_path: Path) -> None:
    launch = ("--checkpoint-dir", "saved", "--checkpoint-interval", "0.01")
    with start(tmp_path, launch=launch, wanted=9, epochs=4, pace=0.3) as job:
        job.wait_for(r"batch 0 10 3")
        job.process.kill()
        job.process.wait()
    time.sleep(1)  # its ranks end themselves
    with start(tmp_path, size=2, launch=launch, epochs=4) as job:
        assert job.end(seconds=300) == 0, job.lines
    check_weights(job, 4)


@pytest.mark.soak
@pytest.mark.parametrize("batch", ["keep", "rescale"])
def test_ranks_come_and_go_and_each_sample_counts_once(batch: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.sh"

    def want(slots: int) -> None:
        hosts.with_suffix(".new").write_text(f"#!/bin/sh\necho localhost:{slots}\n")
        hosts.with_suffix(".new").chmod(0o755)
        os.replace(hosts.with_suffix(".new"), hosts)

    want(2)
    launch = ("--max-np", "4", "--host-discovery-script", str(hosts))
    epochs = 60
    with start(tmp_path, size=2, launch=launch, wanted=9, epochs=epochs, pace=0.25, slow=340, batch=batch) as job:
        job.wait_for(r"batch 0 2 2")
        for slots in (4, 1, 3):
            want(slots)
            job.wait_for(rf"batch \d+ \d+ {slots}")
        assert job.end(seconds=500) == 0, job.lines
    results = job.said(r"done (\S+) (\d+) .*")
    assert len(results) == 3
    assert len(set(results)) == 1  # the same on all ranks
    if batch == "keep":
        wanted = of_keras_alone(epochs, batch_size=8)
        assert [float(item) for item in results[0][0].split(";")] == pytest.approx(wanted, rel=1e-11, abs=1e-11)


@pytest.mark.soak
def test_a_rank_that_is_told_to_leave_loses_no_step(tmp_path: Path) -> None:
    with start(tmp_path, wanted=9, pace=0.1, epochs=6) as job:
        job.wait_for(r"batch 1 5 3")
        os.kill(job.pid(1, 3), signal.SIGTERM)
        assert job.end(seconds=300) == 0, job.lines
    check_weights(job, 6)
    assert not job.events("lost")
    batches = [int(number) for (number,) in job.said(r"batch 0 (\d+) \d")]
    assert batches == list(range(1, 25))


@pytest.mark.parametrize(("count", "shuffle"), [(23, True), (16, False)])
def test_what_is_left_of_an_epoch_is_dealt_out_to_those_who_are_there(pool: Pool, count: int, shuffle: bool) -> None:
    """Every batch of one rank is what the batches of two are together, from wherever they begin."""

    def on_rank(epoch: int, processed: int) -> list[list[int]]:
        with runtime():
            order = SampleOrder(count, seed=4, shuffle=shuffle, drop_last=False)
            tf.random.set_seed(ud.rank())  # of the script; the order is not its business
            data = ElasticDataset(tf.data.Dataset.range(count), order, 8 // ud.size(), count)
            assert elastic_dataset_of(data.dataset.map(lambda each: each).prefetch(1)) is data
            plain = [each.numpy().tolist() for each in data.dataset]
            data.follow(lambda: Progress(order, 8 // ud.size(), 8, ud.size(), Position(epoch, processed)))
            found = [each.numpy().tolist() for each in data.dataset]
            shares = list(order.shares(Position(epoch, processed), rank=ud.rank(), size=ud.size(), global_batch=8))
            assert [len(each) for each in found] == [max(len(share.indices), 1) for share in shares]
            return found if (epoch, processed) != (0, 0) else plain

    orders = {}
    for epoch, processed in ((0, 0), (1, 0), (1, 8), (1, 16)):
        if processed >= count:
            continue
        everyone = pool(2, "shm").run(functools.partial(on_rank, epoch, processed))
        alone = on_rank(epoch, processed)
        for mine, theirs, whole in zip(*everyone, alone, strict=True):
            assert sorted(mine + theirs) == sorted(whole)
        orders[epoch, processed] = [sample for batch in alone for sample in batch]
    assert sorted(orders[1, 0]) == list(range(count))
    assert (orders[1, 0] == list(range(count))) is not shuffle
    assert orders[1, 8] == orders[1, 0][8:]
    assert (orders[0, 0] != orders[1, 0]) is shuffle


ERRORS = (
    'import os, sys\nos.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"\n'
    + NETWORK
    + """
import tensorflow as tf
import unidist.keras as ud

keras.config.set_floatx("float64")

def tell(call):
    try:
        call()
    except Exception as exc:
        os.write(1, f"raised {type(exc).__name__} {exc}\\n".encode())
    else:
        os.write(1, b"raised nothing\\n")

ud.init()
samples = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS))
tell(lambda: ud.shard(samples.filter(lambda *_: True), batch_size=4))
tell(lambda: ud.shard(samples, batch_size=0))
tell(lambda: ud.distribute(network(), keras.optimizers.SGD(), "accumulate=2:reduction=sum", elastic=True))
model, optimizer = ud.distribute(network(), keras.optimizers.SGD(), elastic=True)
model.compile(optimizer, "mse")
data = ud.shard(samples, batch_size=4)
tell(lambda: model.fit(INPUTS, TARGETS, verbose=0))
tell(lambda: model.fit(data, steps_per_epoch=2, verbose=0))
tell(lambda: model.fit(data, verbose=0))
tell(lambda: model.fit(ud.shard(samples, batch_size=4), verbose=0))
other, optimizer = ud.distribute(network(), keras.optimizers.SGD(), elastic=True)
other.compile(optimizer, "mse")
tell(lambda: other.fit(data, verbose=0))

ud.shutdown()
"""
)


def test_what_cannot_be_elastic_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ERRORS)
    with ElasticJob.start(tmp_path, ["-np", "1", "--min-np", "1"], ["script.py"]) as job:
        assert job.end(seconds=200) == 0, job.lines
    found = job.said(r"raised (\w+) ?(.*)")
    wanted = [
        ("UsageError", "assert_cardinality"), ("UsageError", "at least 1"), ("ConfigurationError", "accumulate"),
        ("UsageError", "batch_size=..."), ("UsageError", "steps_per_epoch"), ("nothing", ""),
        ("UsageError", "other data than before"), ("UsageError", "train one model"),
    ]  # fmt: skip
    assert [kind for kind, _ in found] == [kind for kind, _ in wanted], found
    for (_, text), (_, part) in zip(found, wanted, strict=True):
        assert part in text
