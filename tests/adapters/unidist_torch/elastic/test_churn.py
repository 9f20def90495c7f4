"""Ten minutes in which ranks are killed all the time: training goes on, correctly, and nothing piles up."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from elastic_job import ElasticJob

pytestmark = [pytest.mark.parallel, pytest.mark.soak]

SECONDS = float(os.environ.get("UNIDIST_TEST_CHURN_SEC", "600"))
MEAN_PAUSE_SEC = 15.0
SIZE = 4

# 12 samples in a step of all ranks: 2, 3 and 4 divide it. The state knows every loss, so one process can repeat it.
SCRIPT = """
import os, sys, time
import torch
import unidist.torch as ud

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

ud.init()
torch.set_num_threads(1)
torch.manual_seed(3)
inputs = torch.randn(1200, 8, dtype=torch.float64)
targets = inputs.sin().sum(1, keepdim=True)
data = torch.utils.data.TensorDataset(inputs, targets)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
model, optimizer = ud.distribute(model, optimizer)
sampler = ud.elastic.ElasticSampler(data, seed=5)
state = ud.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0, stop=0)
last = int(sys.argv[1])

@ud.elastic.run
def train(state):
    say("enter", ud.rank(), ud.size(), state.step, os.getpid())
    size = 12 // ud.size()
    while True:
        for batch, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_size=size, sampler=sampler)):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            sampler.record_batch(batch, size)
            state.step += 1
            wants_stop = torch.tensor([float(ud.rank() == 0 and os.path.exists("stop"))])
            state.stop = int(ud.allreduce(wants_stop, op=ud.Sum, name="stop").item())
            state.commit()
            if state.stop or state.step == last:
                return
            if last < 0:
                time.sleep(0.05)
                if state.step % 10 == 0:
                    say("step", state.step, ud.rank(), ud.size(), os.getpid(), time.time())
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.commit()

train(state)
with torch.no_grad():
    loss = torch.nn.functional.mse_loss(model(inputs), targets).item()
say("done", repr(loss), state.step, os.getpid())
"""


def test_a_job_whose_ranks_are_killed_all_the_time(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    chance = random.Random(1)
    with ElasticJob.start(tmp_path, ["-np", str(SIZE), "--min-np", "2"], ["script.py", "-1"]) as job:
        first = job.pid(0, SIZE)  # never killed: it and the launcher are looked at
        job.wait_for(r"step 100 .*")
        quiet = _seconds_per_step(job)
        watched = [psutil.Process(job.process.pid), psutil.Process(first)]
        started, kills = time.monotonic(), 0
        begin = max(_steps(job))
        early = None
        while (elapsed := time.monotonic() - started) < SECONDS:
            time.sleep(chance.expovariate(1 / MEAN_PAUSE_SEC))
            if early is None and elapsed > SECONDS / 10:
                early = [_held(one) for one in watched]
            alive = [pid for pid in _members(job) if pid != first and psutil.pid_exists(pid)]
            if alive:
                os.kill(chance.choice(alive), signal.SIGKILL)
                kills += 1
        elapsed = time.monotonic() - started
        steps = max(_steps(job)) - begin
        goodput = steps * quiet / elapsed
        job.wait_for(rf"step {max(_steps(job)) + 50} .*")  # it has settled
        late = [_held(one) for one in watched]
        (tmp_path / "stop").touch()
        assert job.end(seconds=120) == 0, job.lines[-50:]
    losses = {float(loss) for loss, _, _ in job.said(r"done (\S+) (\d+) (\d+)")}
    (count,) = job.steps()
    (tmp_path / "stop").unlink()
    alone = subprocess.run(
        [sys.executable, "script.py", str(count)], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=600
    )
    wanted = float(alone.stdout.split("done ")[1].split()[0])
    print(f"{kills} kills in {elapsed:.0f} s: goodput {goodput:.2f}, loss {losses}, of one process {wanted}")
    print(f"launcher and first rank (descriptors, threads, MB): {early} -> {late}")
    assert early is not None
    assert goodput >= 0.7
    assert losses
    assert all(loss == pytest.approx(wanted, rel=1e-6) for loss in losses)
    for before, after in zip(early, late, strict=True):
        assert after[0] <= before[0] + 4
        assert after[1] <= before[1] + 1
        assert after[2] <= before[2] + 20


def _steps(job: ElasticJob) -> list[int]:
    return [int(step) for (step,) in job.said(r"step (\d+) .*")]


def _seconds_per_step(job: ElasticJob) -> float:
    found = [(int(step), float(at)) for step, at in job.said(r"step (\d+) 0 \d+ \d+ (\S+)")]
    return (found[-1][1] - found[0][1]) / (found[-1][0] - found[0][0])


def _members(job: ElasticJob) -> list[int]:
    """Return the processes of the ranks that are in the world."""
    numbers = {event["worker"]: event["pid"] for event in job.events("process")}
    return [numbers[worker] for worker in job.events("generation")[-1]["workers"] if worker in numbers]


def _held(process: psutil.Process) -> tuple[int, int, float]:
    """Return the open descriptors, the threads and the memory (MB) of a process."""
    return process.num_fds(), process.num_threads(), process.memory_info().rss / 1e6
