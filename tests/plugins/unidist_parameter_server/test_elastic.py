"""Elastic jobs go on with their store: no acknowledged push is lost or applied twice, though commits are older."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
from elastic_job import ElasticJob

pytest.importorskip("torch")

pytestmark = pytest.mark.parallel

# Gradients are integers, and each has a key: so the sum of all that were acknowledged is exact in any order.
_SCRIPT = """
import os, signal, sys, time
import torch
import unidist.torch as ud

def gradient(key):
    return torch.randint(-1000, 1000, (64,), generator=torch.Generator().manual_seed(key)).double()

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

ud.init()
weights = torch.nn.Parameter(torch.zeros(64, dtype=torch.float64))
model = torch.nn.ParameterList([weights])
model, optimizer = ud.distribute(model, torch.optim.SGD([weights], lr=1.0))
state = ud.elastic.TorchState(model, optimizer, step=0, generation=0)
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
        optimizer.zero_grad()
        (weights * gradient(key)).sum().backward()
        optimizer.step()
        pushed += 1
        say("pushed", key)
        state.step += 1
        if state.step % 6 == 0:
            state.commit()

train(state)
ud.barrier()
optimizer.zero_grad()
(weights * 0).sum().backward()
optimizer.step()
say("done", weights.detach().tolist())
"""


@pytest.mark.parametrize("options", ["async:scale=none", "async:scale=none:servers=2"])
def test_no_acknowledged_push_is_lost_with_a_worker(tmp_path: Path, options: str) -> None:
    import torch

    (tmp_path / "script.py").write_text(_SCRIPT)
    line = f"parameter_server={options}:shard_size=64B"
    with ElasticJob.start(tmp_path, ["-np", "3", "--min-np", "2", "--strategy", line], ["script.py", "async"]) as job:
        assert job.end(seconds=120) == 0, job.lines
    assert len({size for _, size, _ in job.said(r"enter (\d) (\d) (\d+)")}) == 2, "it was smaller for a while"
    expected = torch.zeros(64, dtype=torch.float64)
    keys = [int(key) for (key,) in job.said(r"pushed (\d+)")]
    assert len(keys) == len(set(keys)) > 100
    for key in keys:
        expected -= torch.randint(-1000, 1000, (64,), generator=torch.Generator().manual_seed(key)).double()
    found = [ast.literal_eval(text) for (text,) in job.said(r"done (.*)")]
    assert len(found) == 3, job.lines
    for values in found:
        assert values == expected.tolist()


def test_synchronous_steps_go_on_from_the_commit(tmp_path: Path) -> None:
    import torch

    (tmp_path / "script.py").write_text(_SCRIPT)
    options = ["-np", "3", "--min-np", "2", "--strategy", "parameter_server=sync:shard_size=64B"]
    with ElasticJob.start(tmp_path, options, ["script.py", "sync"]) as job:
        assert job.end(seconds=120) == 0, job.lines
    # Generations begin at 0 with 3 ranks, at the commit of 12 with 2, and at 30 with 3 again.
    sizes = [3] * 12 + [2] * 18 + [3] * 10
    expected = torch.zeros(64, dtype=torch.float64)
    for step, size in enumerate(sizes):
        keys = [1000 * step + rank for rank in range(size)]
        expected -= sum(
            torch.randint(-1000, 1000, (64,), generator=torch.Generator().manual_seed(key)).double() for key in keys
        ) / len(keys)
    for (text,) in job.said(r"done (.*)"):
        assert (torch.tensor(ast.literal_eval(text), dtype=torch.float64) - expected).abs().max() < 1e-9, os.linesep
