"""Elastic jobs of PyTorch with zero=3: shards of parameters and state come from those that others keep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from elastic_job import ElasticJob

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1]))  # the ranks get this path too

from _torch_elastic_scripts import SCRIPTS

pytestmark = pytest.mark.parallel

# 24 samples in each of 8 updates of all ranks. From some steps on it waits for the number of ranks that is given.
SCRIPT = """
import json, os, sys, time
import torch
import unidist.torch as ud
import unidist_zero

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 32)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(3)])
        self.frozen = torch.nn.Linear(32, 32).requires_grad_(False)
        self.last = torch.nn.Linear(32, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden):
        self.calls += 1
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return self.last(self.frozen(hidden))

ud.init()
torch.set_num_threads(1)
torch.manual_seed(3)
torch.set_default_dtype(getattr(torch, sys.argv[3]))
sizes = {int(step): size for step, size in json.loads(sys.argv[1]).items()}
with torch.device(sys.argv[2]):
    model = Network()
if sys.argv[2] == "meta":
    drawn = Network()  # the values that all runs begin with
    names = {id(module): name for name, module in model.named_modules()}

    def fill(module):
        source = drawn.get_submodule(names[id(module)])
        for name, each in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            each.copy_(getattr(source, name))

    unidist_zero.init_with(model, fill)
optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=1e-2)
model, optimizer = ud.distribute(model, optimizer)
passes = optimizer._unidist.passes
state = ud.elastic.TorchState(model, optimizer, step=0)
whole = 8 * sum(each.numel() * (3 if each.requires_grad else 1) for each in model.parameters())

@ud.elastic.run
def train(state):
    say("enter", ud.rank(), ud.size(), state.step, os.getpid())
    while state.step < 8:
        wanted = next((sizes[step] for step in sorted(sizes, reverse=True) if step <= state.step), ud.size())
        say("wants", wanted)
        while ud.size() != wanted:
            state.check_host_updates()
            time.sleep(0.01)
        inputs = torch.randn(24, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(state.step))
        mine = inputs[ud.rank() :: ud.size()]
        for part in mine.chunk(passes):
            optimizer.zero_grad()
            outputs = model(part.to(model.last.bias.dtype)).double()
            torch.nn.functional.mse_loss(outputs, part.sin().sum(1, keepdim=True)).backward()
            optimizer.step()
        state.step += 1
        state.commit()
        say("step", state.step, ud.rank())
        if ud.size() > 1:  # this rank's share, and that of another one, are all that it keeps
            kept = sum(memory.nbytes for memory in state._shares._commits[-1].memories)
            assert kept < 2 * whole / ud.size() * 1.3, (kept, whole)
        time.sleep(0.1)

train(state)
sums = [repr(float(value.double().sum())) for value in model.state_dict().values()]
say("done", ";".join(sums), state.step, os.getpid())
"""

Result = list[float]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_model_at_stage_3_moves_to_another_context(rank_pool: RankPoolFactory, name: str) -> None:
    script: Callable[[], Any] = SCRIPTS[name]
    assert rank_pool(2).run(script) == [None, None]


def parameters(text: str) -> Result:
    return [float(item) for item in text.split(";")]


def alone(folder: Path, strategy: str) -> Result:
    """Return what one process computes that nothing happens to."""
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", "{}", "cpu", "float64"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        cwd=folder,
        env={**os.environ, "UNIDIST_STRATEGY": strategy},
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("done ")]
    return parameters(line.split()[1])


def start(
    folder: Path,
    strategy: str,
    number: int,
    *options: str,
    sizes: Mapping[int, int] | None = None,
    device: str = "cpu",
    dtype: str = "float64",
) -> ElasticJob:
    """Start the script as an elastic job."""
    (folder / "script.py").write_text(SCRIPT)
    given = ["-np", str(number), "--min-np", "1", *options, "--strategy", strategy]
    return ElasticJob.start(folder, given, ["script.py", json.dumps(dict(sizes or {})), device, dtype])


def results(job: ElasticJob) -> list[Result]:
    return [parameters(text) for (text,) in job.said(r"done (\S+) \d+ \d+")]


@pytest.mark.soak
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_accumulated_and_clipped_updates_go_on(device: str, tmp_path: Path) -> None:
    with start(tmp_path, "zero=3,accumulate=2,clip_norm=0.5", 4, device=device) as job:
        killed = job.pid(2, 4)
        job.wait_for(r"step 3 \d")
        os.kill(killed, signal.SIGKILL)
        assert job.end() == 0, job.lines
    expected = alone(tmp_path, "accumulate=2,clip_norm=0.5")
    assert len(results(job)) >= 3
    for result in results(job):
        assert result == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.soak
def test_master_weights_go_on(tmp_path: Path) -> None:
    found = []
    for victim in (None, 1):
        with start(tmp_path, "zero=3,precision=bf16", 3, sizes={0: 3}, dtype="float32") as job:
            if victim is not None:
                killed = job.pid(victim, 3)
                job.wait_for(r"step 3 \d")
                os.kill(killed, signal.SIGKILL)
            assert job.end() == 0, job.lines
        found += results(job)
    assert len(found) == 6
    for result in found:
        assert result == found[0]


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["zero=2", "zero=3", "zero=3:whole=true"])
def test_the_number_of_ranks_goes_up_and_down(strategy: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    discover = tmp_path / "discover"
    discover.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discover.chmod(0o755)
    sizes = {0: 2, 2: 4, 4: 1, 6: 3}
    options = ("--max-np", "4", "--host-discovery-script", str(discover))
    with start(tmp_path, strategy, 2, *options, sizes=sizes) as job:
        for size in list(sizes.values())[1:]:
            job.wait_for(f"wants ({size})")
            (tmp_path / "next").write_text(f"localhost:{size}\n")
            (tmp_path / "next").rename(hosts)
        assert job.end(seconds=300) == 0, job.lines
    expected = alone(tmp_path, "data")
    assert len(results(job)) == 3
    for result in results(job):
        assert result == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.soak
def test_a_rank_that_leaves_gives_its_shards_away(tmp_path: Path) -> None:
    with start(tmp_path, "zero=3", 3) as job:
        leaving = job.pid(1, 3)
        job.wait_for(r"step 2 \d")
        os.kill(leaving, signal.SIGTERM)
        assert job.end(seconds=300) == 0, job.lines
    expected = alone(tmp_path, "data")
    assert len(results(job)) >= 2
    assert not job.events("lost")
    for result in results(job):
        assert result == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.soak
def test_a_rank_that_leaves_while_the_one_with_its_copies_dies_gives_its_shards_away(tmp_path: Path) -> None:
    with start(tmp_path, "zero=3", 3) as job:
        leaving, dying = job.pid(1, 3), job.pid(2, 3)
        job.wait_for(r"step 2 \d")
        os.kill(leaving, signal.SIGTERM)
        os.kill(dying, signal.SIGKILL)
        assert job.end(seconds=300) == 0, job.lines
    expected = alone(tmp_path, "data")
    assert results(job)
    for result in results(job):
        assert result == pytest.approx(expected, rel=1e-12, abs=1e-12)
