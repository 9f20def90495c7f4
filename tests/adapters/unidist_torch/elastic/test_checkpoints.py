"""Checkpoints of elastic states in PyTorch: what is trained from one is what would have been trained without a stop."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _training import loss_of, network, runtime
from elastic_job import ElasticJob

import unidist.torch as ud
from tests.adapters.unidist_torch.elastic import test_generations
from tests.adapters.unidist_torch.elastic.test_generations import SCRIPT, parameters
from unidist.checkpoint.format import directory
from unidist.jobs.pool.pool import RankPool

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel
STEPS = 6
undisturbed = test_generations.undisturbed


def train(folder: Path | None, strategy: str, *, crash_at: int = -1, noise: float = 0.0) -> tuple[int, list[float]]:
    """Train as a rank; return the step at which it began, and the parameters at the end."""
    with runtime():
        model = network()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += noise
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        model, optimizer = ud.distribute(model, optimizer, strategy=strategy)
        sampler = ud.elastic.ElasticSampler(range(12 * STEPS), shuffle=False)
        state = ud.elastic.TorchState(model, optimizer, sampler=sampler, step=0)
        if folder is not None:
            state.checkpoint_to(folder, interval=1e-6)

        @ud.elastic.run
        def loop(state: ud.elastic.TorchState) -> int:
            began = state.step
            while state.step < STEPS:
                torch.manual_seed(state.step)
                x = torch.randn(12, 6, dtype=torch.float64)[ud.rank() :: ud.size()]
                y = torch.randint(3, (12,))[ud.rank() :: ud.size()]
                assert sampler.processed_num == 12 * state.step
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
                sampler.record_batch(0, 12 // ud.size())
                state.step += 1
                state.commit()
                if state.step == crash_at:
                    raise ZeroDivisionError
            return began

        try:
            began = loop(state)
        except ZeroDivisionError:
            began = -1
        return began, [value for each in model.parameters() for value in each.detach().flatten().tolist()]


@pytest.mark.parametrize(("strategy", "later"), [("data", "data"), ("zero=2", "zero=1")])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_ended(
    pool: Pool, tmp_path: Path, strategy: str, later: str
) -> None:
    def on_rank() -> None:
        folder = tmp_path / strategy
        train(folder, strategy, crash_at=4)
        began, again = train(folder, later, noise=0.5)
        assert 0 < began <= 4
        _, expected = train(None, "data")
        assert again == pytest.approx(expected, rel=1e-12, abs=1e-12)

    pool(2, "shm").run(on_rank)


def start(size: int, strategy: str, folder: Path) -> ElasticJob:
    """Start the script of the generations' tests with a folder for checkpoints."""
    (folder / "script.py").write_text(SCRIPT)
    options = ["-np", str(size), "--min-np", "1", "--strategy", strategy]
    options += ["--checkpoint-dir", "run", "--checkpoint-interval", "0.01"]
    return ElasticJob.start(folder, options, ["script.py", str(size), strategy])


def results(job: ElasticJob) -> list[list[float]]:
    return [parameters(text) for (text,) in job.said(r"done (\S+) \d+ \d+")]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("strategy", "size", "later", "size_later"),
    [("data", 3, "data", 2), ("zero=2", 3, "zero=2", 3), ("zero=1", 2, "data", 4)],
)
def test_a_job_that_was_killed_with_its_launcher_comes_to_the_same_parameters(
    strategy: str, size: int, later: str, size_later: int, undisturbed: list[float], tmp_path: Path
) -> None:
    with start(size, strategy, tmp_path) as job:
        pids = [job.pid(rank, size) for rank in range(size)]
        job.wait_for(r"step 5 \d")
        job.process.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    found = directory.steps(tmp_path / "run")[-1][0]
    with start(size_later, later, tmp_path) as job:
        assert job.end(seconds=300) == 0, job.lines
        (loaded,) = job.events("checkpoint_loaded")
        assert loaded["commit"] == found
    assert len(results(job)) == size_later
    for result in results(job):
        assert result == pytest.approx(undisturbed, rel=1e-12, abs=1e-12)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["zero=1", "zero=2"])
def test_neighbours_that_are_lost_together_cost_the_steps_since_the_last_checkpoint(
    strategy: str, undisturbed: list[float], tmp_path: Path
) -> None:
    with start(4, strategy, tmp_path) as job:
        victims = [job.pid(rank, 4) for rank in (1, 2)]
        others = {job.pid(rank, 4) for rank in (0, 3)}
        job.wait_for(r"step 3 \d")
        for victim in victims:
            os.kill(victim, signal.SIGSTOP)  # so that neither is replaced before the other is gone
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        assert job.end(seconds=300) == 0, job.lines
        (loaded,) = job.events("checkpoint_loaded")
        assert "the share of rank 1 by rank 2" in loaded["reason"]
        assert others <= job.survivors()
    assert results(job)
    for result in results(job):
        assert result == pytest.approx(undisturbed, rel=1e-12, abs=1e-12)


_BY_FLAG = """
import os, sys
import torch
import unidist.torch as ud

ud.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
step = ud.TrainStep(model, torch.optim.Adam(model.parameters()), torch.nn.functional.mse_loss)
data = torch.utils.data.TensorDataset(torch.randn(64, 4).double(), torch.randn(64, 1).double())
loader = ud.shard(torch.utils.data.DataLoader(data, batch_size=8))
for epoch in range(2):
    for number, (x, y) in enumerate(loader):
        step(x, y)
        if sys.argv[1] == "fails" and epoch == 1 and number == 1:
            os._exit(3)
print("done", [float(value) for each in model.parameters() for value in each.detach().ravel()], flush=True)
"""


@pytest.mark.soak
def test_a_loop_by_the_flag_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_BY_FLAG)
    options = ["-np", "1", "--min-np", "1", "--reset-limit", "1", "--checkpoint-interval", "0.001"]

    def run(how: str, folder: str) -> tuple[int, list[str]]:
        with ElasticJob.start(
            tmp_path, [*options, "--checkpoint-dir", str(tmp_path / folder)], ["script.py", how]
        ) as job:
            return job.end(seconds=120), [text for (text,) in job.said(r"done (.*)")]

    assert run("fails", "run")[0] != 0
    assert directory.steps(tmp_path / "run")[-1][0] >= 8, "it came to the second epoch"
    code, again = run("ends", "run")
    assert code == 0
    assert (code, again) == run("ends", "other")
