"""`TrainStep` with `elastic=True`: the numbers of one process, whoever is lost, comes or goes."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _programs import on_one_rank, runtime
from elastic_job import ElasticJob
from part_pools import PartPools

import unidist.jax as ud
from unidist.elastic.batches import SampleOrder
from unidist.elastic.step_training import Progress
from unidist.errors import ConfigurationError, UsageError
from unidist_jax.elastic import TrainingState

pytestmark = pytest.mark.parallel

EPOCHS = 2
ENVIRONMENT = {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "UNIDIST_TIMEOUT_SEC": "60"}


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"] - y) ** 2)


def fresh() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    return {"w": jnp.asarray(generator.standard_normal((6, 4))), "v": jnp.ones(4), "b": jnp.zeros(())}


def dataset(count: int) -> tuple[Any, Any]:
    x = np.random.default_rng(1).standard_normal((count, 6))
    return x, np.sin(x).sum(1)


def train(count: int, batch_size: int, strategy: str, **options: Any) -> tuple[Any, list[float], Any]:
    """Train, and return parameters, losses, and what the hooks saw."""
    epochs: list[int] = []
    steps: list[int] = []
    policy = ud.elastic.Policy(after_step=lambda: steps.append(1), after_epoch=epochs.append, **options)
    step = ud.TrainStep(loss_fn, fresh(), optax.adam(0.05), strategy, elastic=policy)
    data = ud.shard(dataset(count), batch_size=batch_size, seed=2)
    losses = [float(step(x, y)) for _ in range(EPOCHS) for x, y in data]
    return jax.tree.map(np.asarray, step.params), losses, (epochs, len(steps), len(data))


# In the last step one rank has no sample, or one less than the other.
@pytest.mark.parametrize(("count", "strategy"), [(9, "data"), (15, "data"), (9, "zero=2")])
def test_samples_that_do_not_divide_count_once(jax_pools: PartPools, count: int, strategy: str) -> None:
    def on_rank(count: int, batch_size: int, strategy: str) -> Any:
        with runtime():
            return train(count, batch_size, strategy)

    [(wanted, losses, seen)] = jax_pools.get(1).run(on_rank, (count, 4, "data"))
    steps = -(-count // 4)
    assert seen == ([0, 1], EPOCHS * steps, steps)
    for found in jax_pools.get(2, engine="shm").run(on_rank, (count, 2, strategy)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found[0], wanted)
        np.testing.assert_allclose(found[1], losses, rtol=1e-12)
        assert found[2] == seen


def test_with_accumulate_a_step_takes_as_many_samples_as_its_passes(jax_pools: PartPools) -> None:
    def on_rank(batch_size: int, strategy: str) -> Any:
        with runtime():
            return train(19, batch_size, strategy)

    [(wanted, losses, seen)] = jax_pools.get(1).run(on_rank, (8, "data"))
    for found in jax_pools.get(2, engine="shm").run(on_rank, (2, "accumulate=2")):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found[0], wanted)
        assert math.isnan(found[1][0])  # the first batch was dealt before
        np.testing.assert_allclose(found[1][1:], losses, rtol=1e-12)
        assert found[2] == seen


@pytest.mark.parametrize("strategy", ["precision=fp16", "precision=fp16,zero=1"])
def test_a_rank_that_joins_has_the_scale_and_the_count_of_the_others(jax_pools: PartPools, strategy: str) -> None:
    def on_rank(strategy: str) -> tuple[float, int]:
        with runtime():
            params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), fresh())
            step = ud.TrainStep(loss_fn, params, optax.sgd(0.05), strategy, elastic=True)
            update = step.optimizer.binding.distributed_update
            assert update.scaler is not None
            state = TrainingState(step, Progress(SampleOrder(8, 0, False, False), 4, 8, 2), {})
            if ud.rank() == 0:
                update.step, update.scaler.scale = 7, 8.0
            state.sync()
            synced = update.scaler.scale, update.step
            update.step, update.scaler.scale = 9, 2.0
            state.restore()
            assert (update.scaler.scale, update.step) == synced
            return synced

    assert jax_pools.get(2, engine="shm").run(on_rank, (strategy,)) == [(8.0, 7), (8.0, 7)]


@on_one_rank
def test_what_cannot_be_dealt_out_anew_is_an_error_before_training() -> None:
    with runtime():

        def make(**options: Any) -> ud.TrainStep:
            return ud.TrainStep(loss_fn, fresh(), optax.sgd(0.1), **options)

        x, y = dataset(8)
        with pytest.raises(ConfigurationError, match="adds the passes up"):
            make(elastic=True, strategy="accumulate=2:reduction=sum")
        with pytest.raises(UsageError, match=r"ud\.shard"):
            make(elastic=True)(x, y)
        make(elastic=False)(x, y)
        aux = ud.TrainStep(lambda *given: (loss_fn(*given), 1), fresh(), optax.sgd(0.1), has_aux=True, elastic=True)
        batch = next(iter(ud.shard((x, y), batch_size=2)))
        with pytest.raises(UsageError, match="has_aux"):
            aux(*batch)


@on_one_rank
def test_batches_that_are_not_given_once_are_an_error() -> None:
    with runtime():
        step = ud.TrainStep(loss_fn, fresh(), optax.sgd(0.1), elastic=True)
        data = ud.shard(dataset(8), batch_size=2)
        batches = iter(data)
        batch = next(batches)
        step(*batch)
        with pytest.raises(UsageError, match="twice"):
            step(*batch)
        next(batches)
        with pytest.raises(UsageError, match="not given"):
            next(batches)
        data.take_share()
        with pytest.raises(UsageError, match="epoch 0 was left before its end"):
            next(iter(data))


# Worker 1 is lost in the middle of a step of 3 ranks, while the others are about to exchange. The samples that counted
# are a part of the state. Losses are traced once for each number of samples that a micro-batch has, and once before.
SCRIPT = """
import collections, os, signal, sys, time
import jax, jax.numpy as jnp, numpy as np, optax
import unidist.jax as ud

ud.init()
count, batch_size, epochs = 46, 4, 3
x = np.random.default_rng(3).standard_normal((count, 6))
data = ud.shard((x, np.sin(x).sum(1), np.arange(count)), batch_size=batch_size, seed=5)
generator = np.random.default_rng(0 if ud.rank() == 0 else 7)
params = {"w": jnp.asarray(generator.standard_normal((6, 4))), "v": jnp.ones(4), "b": jnp.zeros(())}
traced = collections.Counter()

def loss_fn(params, x, y, numbers):
    traced[len(x)] += 1
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"] - y) ** 2)

class Seen:
    def __init__(self):
        self.counts, self.own, self.sizes = collections.Counter(), [], []
    def state_dict(self):
        return {"counts": self.counts, "sizes": self.sizes}
    def load_state_dict(self, state):
        self.counts, self.sizes, self.own = state["counts"], state["sizes"], []
    def add(self):
        for part in ud.allgather_object(list(share.indices)):
            self.counts.update(part)
        self.sizes.append(ud.size())
        os.write(1, f"step {len(self.sizes)} {os.getpid()}\\n".encode())
        while sys.argv[2] == "killed" and len(self.sizes) == 8:
            time.sleep(0.01)

seen, share = Seen(), None
take = data.take_share
def noting():
    global share
    share = take()
    return share
data.take_share = noting
policy = ud.elastic.Policy(state={"seen": seen}, after_step=seen.add, commit_every=int(sys.argv[1]))
step = ud.TrainStep(loss_fn, params, optax.adam(1e-2), elastic=policy)
for epoch in range(epochs):
    for batch in data:
        if sys.argv[2] == "lost" and os.environ.get("UNIDIST_WORKER") == "1" and len(seen.sizes) == 6:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        step(*batch)
assert seen.counts == {number: epochs for number in range(count)}, seen.counts
sums = ";".join(repr(float(leaf.sum())) for leaf in jax.tree.leaves(step.params))
os.write(1, f"done {sums} {','.join(map(str, seen.sizes))} {max(traced.values())}\\n".encode())
"""


@pytest.mark.parametrize(
    ("commit_every", "strategy"),
    [
        (1, "data"),
        pytest.param(1, "zero=2", marks=pytest.mark.soak),
        (1, "zero=3"),
        pytest.param(3, "clip_norm=0.5", marks=pytest.mark.soak),
        pytest.param(3, "zero=1", marks=pytest.mark.soak),
    ],
)
def test_a_loop_goes_on_when_a_rank_is_lost_in_a_step(commit_every: int, strategy: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["-np", "3", "--min-np", "2", "--strategy", strategy]
    found = {}
    for how in ("lost", "whole"):
        with ElasticJob.start(tmp_path, options, ["script.py", str(commit_every), how], ENVIRONMENT) as job:
            assert job.end(seconds=300) == 0, job.lines
        found[how] = job.said(r"done (\S+) (\S+) (\d+)")
    assert len(found["lost"]) >= 2
    wanted = [float(text) for text in found["whole"][0][0].split(";")]
    for sums, sizes, traced in found["lost"]:
        assert [float(text) for text in sums.split(";")] == pytest.approx(wanted, rel=1e-12, abs=1e-12)
        assert "2" in sizes.split(",")
        if "zero" not in strategy:
            assert traced in ("1", "2")  # each shape once, and the first one twice, whatever the number of ranks


def test_a_job_that_was_killed_with_its_launcher_goes_on_from_its_checkpoint_with_other_ranks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)

    def start(size: int, how: str, *options: str) -> ElasticJob:
        launch = ["-np", str(size), "--min-np", "1", *options]
        return ElasticJob.start(tmp_path, launch, ["script.py", "1", how], ENVIRONMENT)

    durable = ("--checkpoint-dir", "run", "--checkpoint-interval", "0.01")
    with start(3, "killed", *durable) as job:
        job.wait_for(r"step 6 \d+")
        job.wait_for_event("checkpoint")
        job.process.kill()
        for pid in {int(pid) for (pid,) in job.said(r"step \d+ (\d+)")}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with start(2, "again", *durable) as job:
        assert job.end(seconds=300) == 0, job.lines
        [loaded] = job.events("checkpoint_loaded")
        assert loaded["commit"] > 0
    found = job.said(r"done (\S+) (\S+) (\d+)")
    with start(3, "whole") as job:
        assert job.end(seconds=300) == 0, job.lines
    wanted = [float(text) for text in job.said(r"done (\S+) .*")[0][0].split(";")]
    assert len(found) == 2
    for sums, sizes, _ in found:
        assert [float(text) for text in sums.split(";")] == pytest.approx(wanted, rel=1e-12, abs=1e-12)
        assert "3" in sizes.split(",")
