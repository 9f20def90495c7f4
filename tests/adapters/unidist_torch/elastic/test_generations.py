"""PyTorch on ranks that come and go: the parameters at the end are those of a run that nothing happened to."""

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

# 60 samples in each of 2 epochs, 12 in a step of all ranks. In step 4 it waits until all ranks are there again,
# and while there is a file `hold`.
SCRIPT = """
import os, sys, time
import torch
import unidist.torch as ud

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

ud.init()
torch.manual_seed(3)
torch.set_num_threads(1)
wanted = int(sys.argv[1])
inputs = torch.randn(60, 8, dtype=torch.float64)
targets = inputs.sin().sum(1, keepdim=True)
data = torch.utils.data.TensorDataset(inputs, targets)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
torch.manual_seed(int(os.environ.get("UNIDIST_WORKER", 0)))  # which is another one on each, on purpose
for parameter in model.parameters() if "UNIDIST_WORKER" in os.environ else ():
    parameter.data += 0.0 if os.environ["UNIDIST_WORKER"] == "0" else 1.0
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
if sys.argv[2].startswith("zero=3"):  # sees the model
    model, optimizer = ud.distribute(model, optimizer)
else:
    optimizer = ud.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = ud.elastic.ElasticSampler(data, seed=5)
resets = []
state = ud.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0, samples=[])
state.register_reset_callbacks([lambda: resets.append(ud.size())])

@ud.elastic.run
def train(state):
    say("enter", ud.rank(), ud.size(), state.step, os.getpid())
    size = 12 // ud.size()
    while state.epoch < 2:
        for batch, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_size=size, sampler=sampler)):
            while state.step == 4 and (ud.size() < wanted or os.path.exists("hold")):
                state.check_host_updates()
                time.sleep(0.01)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            own = list(sampler.indices[batch * size : (batch + 1) * size])
            state.samples = state.samples + [(state.epoch, i) for part in ud.allgather_object(own) for i in part]
            sampler.record_batch(batch, size)
            state.step += 1
            state.commit()
            say("step", state.step, ud.rank())
            time.sleep(0.1)
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.commit()

train(state)
assert sorted(state.samples) == [(epoch, i) for epoch in range(2) for i in range(60)], state.samples
say("done", ";".join(repr(float(value.sum())) for value in model.state_dict().values()), state.step, os.getpid())
say("resets", resets)
"""


def parameters(text: str) -> list[float]:
    return [float(item) for item in text.split(";")]


def start(size: int, strategy: str, folder: Path) -> ElasticJob:
    """Start the script of this folder as an elastic job."""
    options = ["-np", str(size), "--min-np", "1", "--strategy", strategy]
    return ElasticJob.start(folder, options, ["script.py", str(size), strategy])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return what one process computes that nothing happens to."""
    script = tmp_path_factory.mktemp("one") / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), "1", "data"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=script.parent,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("done ")]
    return parameters(line.split()[1])


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("size", "victim", "strategy"),
    [
        (3, 1, "zero=3"),
        *(pytest.param(3, 1, strategy, marks=pytest.mark.soak) for strategy in ("data", "zero=2")),
        *(
            pytest.param(size, victim, strategy, marks=pytest.mark.soak)
            for size, victim in ((3, 0), (4, 3), (4, 0), (2, 1))
            for strategy in ("data", "zero=1", "zero=2", "zero=2:whole=true", "zero=3", "zero=3:whole=true")
        ),
    ],
)
def test_a_killed_rank_is_replaced_and_the_result_is_that_of_one_process(
    size: int, victim: int, strategy: str, undisturbed: list[float], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "hold").touch()
    with start(size, strategy, tmp_path) as job:
        pids = {job.pid(rank, size) for rank in range(size)}
        killed = job.pid(victim, size)
        job.wait_for(r"step 2 \d")
        os.kill(killed, signal.SIGKILL)
        (tmp_path / "hold").unlink()
        assert job.end(seconds=300) == 0, job.lines
    results = [parameters(text) for (text,) in job.said(r"done (\S+) \d+ \d+")]
    assert len(results) == size
    for result in results:
        assert result == pytest.approx(undisturbed, rel=1e-12, abs=1e-12)
    assert pids - {killed} <= job.survivors()
    assert [event["world_size"] for event in job.events("generation")] == [size, size - 1, size]
    assert job.said(r"resets (.*)").count((str([size - 1, size]),)) == size - 1


@pytest.mark.parallel
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_are_killed_at_random_steps_lose_no_share(
    seed: int, undisturbed: list[float], tmp_path: Path
) -> None:
    chance = random.Random(seed)
    size, strategy = chance.choice((2, 3, 4)), chance.choice(("zero=1", "zero=2:whole=true", "zero=3"))
    (tmp_path / "script.py").write_text(SCRIPT)
    with start(size, strategy, tmp_path) as job:
        for step in (chance.randrange(1, 4), chance.randrange(5, 9)):  # between the two, all ranks are there again
            job.wait_for(rf"step {step} \d")
            places = job.said(r"enter (\d+) (\d+) \d+ (\d+)")
            pid = chance.choice([int(pid) for _, count, pid in places if int(count) == size][-size:])
            time.sleep(chance.random() * 0.1)
            os.kill(pid, signal.SIGKILL)
        assert job.end(seconds=300) == 0, job.lines
    results = [parameters(text) for (text,) in job.said(r"done (\S+) \d+ \d+")]
    assert len(results) >= size - 1
    for result in results:
        assert result == pytest.approx(undisturbed, rel=1e-12, abs=1e-12)


@pytest.mark.parallel
@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["zero=2", "zero=3"])
def test_neighbours_that_are_lost_together_end_the_job_with_an_error_that_names_them(
    strategy: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with start(4, strategy, tmp_path) as job:
        victims = [job.pid(rank, 4) for rank in (1, 2)]
        job.wait_for(r"step 2 \d")
        for victim in victims:
            os.kill(victim, signal.SIGSTOP)  # so that neither is replaced before the other is gone
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        assert job.end(seconds=300) != 0
    assert any("the share of rank 1 by rank 2" in line for line in job.lines), job.lines
    assert not job.said(r"done .*")
