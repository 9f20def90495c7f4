"""`TrainStep` with `elastic=True`: the numbers of one process, whoever is lost, comes or goes."""

from __future__ import annotations

import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _training import FEATURES, assert_close, network, runtime
from elastic_job import ElasticJob
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unidist.torch as ud
from unidist.errors import ConfigurationError, UsageError
from unidist.jobs.pool.pool import RankPool

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel

EPOCHS = 2


def dataset(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (count,), generator=generator))


def train(count: int, batch_size: int, strategy: str, **options: Any) -> tuple[list[Any], list[float], Any]:
    """Train, and return parameters, losses, and what the hooks saw; with a learning rate that falls."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    epochs: list[int] = []
    policy = ud.elastic.Policy(
        state={"scheduler": scheduler}, after_step=scheduler.step, after_epoch=epochs.append, **options
    )
    step = ud.TrainStep(model, optimizer, nn.functional.cross_entropy, strategy, elastic=policy)
    loader = ud.shard(DataLoader(dataset(count), batch_size=batch_size, shuffle=True), seed=2)
    losses = [float(step(x, y)) for _ in range(EPOCHS) for x, y in loader]
    whole = list(model.state_dict().values())  # also where a rank has a share only
    return whole, losses, (epochs, scheduler.last_epoch, len(loader))


# In the last step one rank has no sample, or one less than the other.
@pytest.mark.parametrize(("count", "strategy"), [(9, "data"), (9, "zero=2"), (9, "zero=3:shared=false"), (15, "data")])
def test_samples_that_do_not_divide_count_once(pool: Pool, count: int, strategy: str) -> None:
    def on_rank() -> Any:
        with runtime():
            return train(count, 2, strategy)

    with runtime():
        wanted, losses, seen = train(count, 4, "data")
    steps = -(-count // 4)
    assert seen == ([0, 1], EPOCHS * steps, steps)
    for found in pool(2).run(on_rank):
        assert_close(found[0], wanted)
        torch.testing.assert_close(found[1], losses, rtol=1e-12, atol=1e-12)
        assert found[2] == seen


@pytest.mark.parametrize("strategy", ["accumulate=2", "zero=2,accumulate=2", "zero=3:shared=false,accumulate=2"])
def test_with_accumulate_a_step_takes_as_many_samples_as_its_passes(pool: Pool, strategy: str) -> None:
    def on_rank() -> Any:
        with runtime():
            return train(19, 2, strategy)

    with runtime():
        wanted, losses, seen = train(19, 8, "data")
    for found in pool(2).run(on_rank):
        assert_close(found[0], wanted)
        assert math.isnan(found[1][0])  # the first batch was dealt before
        torch.testing.assert_close(found[1][1:], losses, rtol=1e-12, atol=1e-12)
        assert found[2] == seen


def test_what_cannot_be_dealt_out_anew_is_an_error_before_training() -> None:
    with runtime():
        model = network()
        loader = DataLoader(dataset(8), batch_size=2)

        def make(**options: Any) -> ud.TrainStep:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return ud.TrainStep(model, optimizer, nn.functional.cross_entropy, **options)

        with pytest.raises(ConfigurationError, match="adds the passes up"):
            make(elastic=True, strategy="accumulate=2:reduction=sum")
        with pytest.raises(UsageError, match=r"ud\.shard"):
            make(elastic=True)(*next(iter(loader)))
        make(elastic=False)(*next(iter(loader)))
        with pytest.raises(UsageError, match="choices: keep, rescale"):
            ud.elastic.Policy(global_batch="grow")  # type: ignore[arg-type]  # which is the point
        with pytest.raises(UsageError, match="state_dict"):
            ud.elastic.Policy(state={"losses": []})


def test_batches_that_are_not_given_once_are_an_error() -> None:
    with runtime():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = ud.TrainStep(model, optimizer, nn.functional.cross_entropy, elastic=True)
        loader = ud.shard(DataLoader(dataset(8), batch_size=2))
        batches = iter(loader)
        batch = next(batches)
        step(*batch)
        with pytest.raises(UsageError, match="twice"):
            step(*batch)
        next(batches)
        with pytest.raises(UsageError, match="not given"):
            next(batches)
        loader.take_share()
        with pytest.raises(UsageError, match="epoch 0 was left before its end"):
            next(iter(loader))


@pytest.mark.parametrize("done", range(6))
@pytest.mark.parametrize("saved_elastic", [True, False])
def test_elastic_training_continues_where_a_state_of_the_loader_says(done: int, saved_elastic: bool) -> None:
    """Five samples make three steps of an epoch."""

    def begin(parameters: Any = None, *, elastic: bool = True) -> tuple[Any, Any]:
        model = network()
        if parameters is not None:
            model.load_state_dict(parameters)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = ud.TrainStep(model, optimizer, nn.functional.cross_entropy, elastic=elastic)
        return step, ud.shard(DataLoader(dataset(5), batch_size=2, shuffle=True), seed=2)

    def losses(step: Any, loader: Any, first_epoch: int) -> list[float]:
        return [float(step(x, y)) for _ in range(first_epoch, 3) for x, y in loader]

    with runtime():
        wanted = losses(*begin(elastic=saved_elastic), 0)
        step, loader = begin(elastic=saved_elastic)
        batches = (batch for _ in range(3) for batch in loader)
        for _ in range(done):
            step(*next(batches))
        state = loader.state_dict()
        step, again = begin({key: value.clone() for key, value in step.model.state_dict().items()})
        again.load_state_dict(state)
        assert again.state_dict() == state
        torch.testing.assert_close(losses(step, again, state["epoch"]), wanted[done:], rtol=1e-12, atol=1e-12)
        with pytest.raises(UsageError, match="begun with"):
            again.load_state_dict(state)


def test_elastic_training_does_not_continue_in_samples_that_it_leaves_out() -> None:
    """Of five samples it uses four, in two steps; an ordinary loader of one rank has a third one."""
    with runtime():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = ud.TrainStep(model, optimizer, nn.functional.cross_entropy, elastic=True)
        loader = ud.shard(DataLoader(dataset(5), batch_size=2), tail="drop")
        loader.load_state_dict(loader.state_dict() | {"epoch": 1, "processed": [4]})
        losses = [float(step(x, y)) for _ in range(2) for x, y in loader]
        assert [math.isnan(loss) for loss in losses] == [True, False, False]
        assert (loader.state_dict()["epoch"], loader.state_dict()["processed"]) == (3, [0])


def test_samples_that_a_sampler_chooses_are_an_error_before_training() -> None:
    with runtime():
        model = network()
        step = ud.TrainStep(
            model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, elastic=True
        )
        sampler = torch.utils.data.SubsetRandomSampler(range(4))
        with pytest.raises(UsageError, match=r"a SubsetRandomSampler over 8 samples.*cannot redistribute"):
            step(*next(iter(ud.shard(DataLoader(dataset(8), batch_size=2, sampler=sampler)))))


# Worker 1 is lost in the middle of a step of 3 ranks: after its forward pass, when the others are about to exchange.
# The samples that counted are a part of the state.
SCRIPT = """
import collections, os, signal, sys
import torch
import unidist.torch as ud

ud.init()
torch.manual_seed(3)
torch.set_num_threads(1)
count, batch_size, epochs = 46, int(sys.argv[1]), 3
inputs = torch.randn(count, 8, dtype=torch.float64)
data = torch.utils.data.TensorDataset(inputs, inputs.sin().sum(1, keepdim=True), torch.arange(count))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

class Seen:
    def __init__(self):
        self.counts, self.own, self.sizes = collections.Counter(), [], []
    def state_dict(self):
        return {"counts": self.counts, "sizes": self.sizes}
    def load_state_dict(self, state):
        self.counts, self.sizes, self.own = state["counts"], state["sizes"], []
    def add(self):
        for part in ud.allgather_object(self.own):
            self.counts.update(part)
        self.own = []
        self.sizes.append(ud.size())

seen = Seen()

def loss_fn(outputs, targets):
    wanted, numbers = targets
    assert len(numbers) <= batch_size
    if os.environ.get("UNIDIST_WORKER") == "1" and len(seen.sizes) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    seen.own += numbers.tolist()
    return torch.nn.functional.mse_loss(outputs, wanted)

def resized(old, new):
    resizes.append((old, new))
    optimizer.param_groups[0]["lr"] *= new / old

resizes = []
policy = ud.elastic.Policy(
    state={"seen": seen},
    after_step=seen.add,
    commit_every=int(sys.argv[2]),
    global_batch=sys.argv[3],
    on_resize=resized if sys.argv[3] == "rescale" else None,
)
step = ud.TrainStep(model, optimizer, loss_fn, elastic=policy)
loader = ud.shard(torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=True), seed=5)
for epoch in range(epochs):
    for x, y, numbers in loader:
        step(x, (y, numbers))
assert seen.counts == {number: epochs for number in range(count)}, seen.counts
sums = ";".join(repr(float(p.detach().sum())) for p in model.state_dict().values())
os.write(1, f"done {sums} {','.join(map(str, seen.sizes))}\\n".encode())
"""


def start(folder: Path, *, commit_every: int, strategy: str = "data", global_batch: str = "keep") -> ElasticJob:
    """Start the script on 3 ranks."""
    (folder / "script.py").write_text(SCRIPT)
    options = ["-np", "3", "--min-np", "2", "--strategy", strategy]
    script = ["script.py", "4", str(commit_every), global_batch]
    return ElasticJob.start(folder, options, script, {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(
    ("commit_every", "strategy"),
    [(1, "data"), *(pytest.param(3, each, marks=pytest.mark.soak) for each in ("data", "zero=2", "zero=3"))],
)
def test_a_loop_goes_on_when_a_rank_is_lost_in_a_step(
    commit_every: int, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(tmp_path, commit_every=commit_every, strategy=strategy) as job:
        assert job.end(seconds=300) == 0, job.lines
    monkeypatch.setattr(sys, "argv", ["script.py", "12", "1", "keep"])
    model = runpy.run_path(str(tmp_path / "script.py"))["model"]
    ud.shutdown()
    wanted = [float(value.sum()) for value in model.state_dict().values()]
    results = job.said(r"done (\S+) (\S+)")
    assert len(results) >= 2
    for parameters, sizes in results:
        assert [float(item) for item in parameters.split(";")] == pytest.approx(wanted, rel=1e-12, abs=1e-12)
        assert sizes.startswith("3,3,3,3,")
        assert len(sizes.split(",")) == 12
    assert len(job.events("lost")) == 1


@pytest.mark.soak
def test_batches_of_ranks_stay_as_they_are_where_the_global_one_is_rescaled(tmp_path: Path) -> None:
    with start(tmp_path, commit_every=1, global_batch="rescale") as job:
        assert job.end(seconds=300) == 0, job.lines
    results = set(job.said(r"done (\S+) (\S+)"))
    assert len(results) == 1  # on all ranks the same
    assert len(next(iter(results))[1].split(",")) > 12
    assert len(job.events("lost")) == 1
