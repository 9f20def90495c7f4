"""Elastic jobs whose model is divided: a rank is killed, and the numbers are those of one process."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

import pytest
import torch
from elastic_job import ElasticJob

import unidist.torch as ud

pytestmark = pytest.mark.parallel

SPARE = ["--spares", "1"]
LOST_AT = 5
"""Steps that are done when workers are killed, in the forward pass of the next one."""

SCRIPT = """
import os, signal, sys, time
import torch
import unidist.torch as ud

ud.init()
torch.manual_seed(3)
torch.set_num_threads(1)
batch_size, victims = int(sys.argv[1]), sys.argv[2].split(",")
inputs = torch.randn(46, 8, dtype=torch.float64)
data = torch.utils.data.TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)]
model = torch.nn.Sequential(*layers).double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def die(module, args, output):
    if os.environ.get("UNIDIST_WORKER") in victims and scheduler.last_epoch == int(sys.argv[4]):
        say("dies", time.time())
        os.kill(os.getpid(), signal.SIGKILL)

for layer in layers:
    layer.register_forward_hook(die)

policy = ud.elastic.Policy(state={"scheduler": scheduler}, after_step=scheduler.step)
step = ud.TrainStep(model, optimizer, torch.nn.functional.mse_loss, elastic=policy)
loader = ud.shard(torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=True), seed=5)
for epoch in range(3):
    for x, y in loader:
        step(x, y)
        say("step", scheduler.last_epoch, ud.rank(), ud.size(), os.getpid(), time.time())
        while scheduler.last_epoch == int(sys.argv[4]) - 1 and not os.path.exists(sys.argv[3]):
            time.sleep(0.01)
ud.save("final", model=step.model, optimizer=optimizer)
say("done", ud.rank(), os.getpid(), scheduler.last_epoch)
"""


def start(folder: Path, options: list[str], *, victims: str) -> ElasticJob:
    """Start the script on 4 ranks, two replicas of two, of which those with these numbers of workers are killed.

    With spares, one of them stands by when that happens.
    """
    (folder / "script.py").write_text(SCRIPT)
    job = ElasticJob.start(
        folder,
        ["-np", "4", "--min-np", "2", *options],
        ["script.py", "4", victims, "go", str(LOST_AT)],
        {"OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while options[-2:] == SPARE and not job.events("standby") and time.monotonic() < deadline:
        time.sleep(0.05)
    (folder / "go").touch()
    return job


def check_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that model and optimizer, as the job has saved them, are those of one process that nothing happened to."""
    monkeypatch.chdir(folder)
    (folder / "final").rename(folder / "found")
    monkeypatch.setattr(sys, "argv", ["script.py", "8", "none", "go", "0"])
    left = runpy.run_path("script.py")
    model, optimizer = left["model"], left["optimizer"]
    wanted = [value.clone() for value in model.state_dict().values()]
    slots = [torch.as_tensor(value).clone() for state in optimizer.state.values() for value in state.values()]
    ud.load("found", model=model, optimizer=optimizer)
    found = [torch.as_tensor(value) for state in optimizer.state.values() for value in state.values()]
    ud.shutdown()
    torch.testing.assert_close(list(model.state_dict().values()), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, slots, rtol=1e-12, atol=1e-12)


def pids(job: ElasticJob) -> dict[int, int]:
    """Return the process of each rank in the first step after the loss."""
    steps = job.said(rf"step {LOST_AT + 1} (\d+) \d+ (\d+) \S+")
    return {int(rank): int(pid) for rank, pid in steps}


def pause(job: ElasticJob) -> float:
    """Return the seconds from the loss of a rank to the end of the next step, as the job itself has measured them."""
    [recovered] = job.events("recovered")[:1]
    assert recovered["is_complete"]
    found = sum(recovered[f"{phase}_sec"] for phase in ("detect", "reform", "restore", "first_step"))
    return float(found)


@pytest.mark.parametrize(("strategy", "options"), [("pipeline=2", []), ("tensor=2", SPARE)])
def test_a_replica_goes_on_alone_or_with_a_process_that_stands_by(
    strategy: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(tmp_path, ["--strategy", strategy, *options], victims="1") as job:
        assert job.end(seconds=300) == 0, job.lines
    assert len(job.events("lost")) == 1
    size = 4 if options else 2
    after = job.events("generation")[1]
    assert after["world_size"] == size
    started = {event["worker"]: event["pid"] for event in job.events("process")}
    assert pids(job) == {rank: started[worker] for rank, worker in enumerate(after["workers"])}
    assert set(after["workers"]) <= {0, 2, 3, 4}  # no survivor was started again
    assert pause(job) < 10  # less than 1 s where nothing else runs; the soak tests measure it
    stands_by = any("stands by: ranks train in whole replicas of the model" in line for line in job.lines)
    assert stands_by == (not options)
    check_numbers(tmp_path, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("strategy", "victim", "options"),
    [
        *((strategy, victim, SPARE) for strategy in ("pipeline=2", "tensor=2") for victim in "0123"),
        ("pipeline=2,zero=1", "0", SPARE),
        ("pipeline=2,zero=2", "3", []),
        ("tensor=2,zero=1", "2", []),
        ("tensor=2,zero=2", "0", SPARE),
        ("pipeline=2,accumulate=2", "1", []),
        ("pipeline=2:schedule=zb-h1", "3", SPARE),
        ("pipeline=2,clip_norm=1", "2", SPARE),
        ("tensor=2,clip_norm=1", "1", []),
    ],
)
def test_any_rank_may_be_lost(
    strategy: str, victim: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(tmp_path, ["--strategy", strategy, *options], victims=victim) as job:
        assert job.end(seconds=300) == 0, job.lines
    assert len(job.events("lost")) == 1
    assert job.events("generation")[1]["world_size"] == (4 if options else 2)
    assert pause(job) < 2
    if "clip_norm" not in strategy and "accumulate" not in strategy:
        check_numbers(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("num", "victims", "timeout", "reason"),
    [
        (4, "2,3", "3", "--elastic-timeout"),
        *(
            pytest.param(num, victims, "600", "failed again and again", marks=pytest.mark.soak)
            for num, victims in ((2, "1"), (4, "2,3"))
        ),
    ],
)
def test_with_too_few_ranks_for_a_replica_another_strategy_goes_on_from_the_checkpoint(
    num: int, victims: str, timeout: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks with the second stage are lost, and processes that come in their place never join, or end at once."""
    in_their_place = "sys.exit(1)" if timeout == "600" else "time.sleep(600)"
    script = f"""
import os, sys, time
if "pipeline" not in os.environ.get("UNIDIST_STRATEGY", ""):
    sys.argv[2] = "none"  # is killed
elif int(os.environ["UNIDIST_WORKER"]) >= {num}:
    {in_their_place}
"""
    (tmp_path / "script.py").write_text(script + SCRIPT)
    options = ["--checkpoint-dir", "saved", "--checkpoint-interval", "0.001", "--elastic-timeout", timeout]
    with ElasticJob.start(
        tmp_path,
        ["-np", str(num), "--min-np", "2", "--strategy", "pipeline=2", "--fallback-strategy", "zero=1", *options],
        ["script.py", str(16 // num), victims, ".", str(LOST_AT)],
        {"OMP_NUM_THREADS": "1"},
    ) as job:
        assert job.end(seconds=300) == 0, job.lines
    assert len(job.said(r"dies \S+")) == num // 2
    [fallback] = job.events("fallback")
    assert fallback["strategy"] == "zero=1"
    assert num // 2 <= fallback["num_proc"] <= num  # those that are left, and processes that have just been started
    assert reason in fallback["reason"]
    assert len(job.said(r"step 1 0 \d+ .*")) == 1, "it began again, and not from the checkpoint"
    assert len({int(pid) for (pid,) in job.said(r"done \d+ (\d+) .*")}) == fallback["num_proc"]
    check_numbers(tmp_path, monkeypatch)
