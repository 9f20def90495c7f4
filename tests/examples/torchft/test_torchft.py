"""torchft's replicas over unidist: one is killed in an all-reduce, the others go on, it comes back; weights are right.

Each replica is a job of torchrun of its own, as torchft's users start them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from unidist_command import Command

pytest.importorskip("torchft")
pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from _replicas import FATAL_STEP, REPLICAS, TOGETHER, batch, network, optimizer_of
from torchft.coordination import LighthouseServer

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples/torchft/digits.py"


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """The address of the server that tells torchft's replicas of each other."""
    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000)
    yield server.address()
    server.shutdown()


def run(command: Command, lighthouse: str, replicas: int, *words: str, killed: int | None = None) -> list[str]:
    """Run a script as several jobs of torchrun, and return what each printed; `killed`: its rank is killed once."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
    torchrun += ["--monitor-interval", "0.1", "--redirects", "3", "--log-dir"]  # a job whose pipe is full stands still
    env = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse, "OMP_NUM_THREADS": "1"}
    folders = [command.folder / f"job{replica}" for replica in range(replicas)]
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(
                command.start_words([*torchrun, str(folder), *words], env={**env, "REPLICA": str(replica)})
            )
            for replica, folder in enumerate(folders)
        ]
        stack.callback(lambda: [job.kill() for job in jobs])  # if one of them stands still after all
        if killed is not None:
            assert command.wait_until(lambda: "step" in printed(folders[killed], "stdout"), 120)
            (rank,) = psutil.Process(jobs[killed].pid).children()
            rank.kill()
        for job, folder in zip(jobs, folders, strict=True):
            _, err = job.communicate(timeout=150)
            assert job.returncode == 0, err[-2000:] + printed(folder, "stderr")[-2000:]
    return [printed(folder, "stdout") for folder in folders]


def printed(folder: Path, stream: str) -> str:
    """Return what the processes that a torchrun has started have printed by now."""
    return "".join(path.read_text() for path in sorted(folder.rglob(f"{stream}.log")))


def replay(notes: list[dict[str, Any]]) -> list[float]:
    """Return the weights of one process that makes the steps that the replicas made, with the same batches."""
    done = {note["step"]: note["quorum"] for note in notes if note.get("done")}
    assert sorted(done) == list(range(len(done)))
    model = network()
    optimizer = optimizer_of(model)
    for step, quorum in sorted(done.items()):
        who = {
            (note["replica"], note["drawn"], note["replicas"])
            for note in notes
            if (note["step"], note["quorum"]) == (step, quorum) and note["takes part"]
        }
        (count,) = {replicas for _, _, replicas in who}
        optimizer.zero_grad()
        for replica, drawn, _ in who:
            (model(batch(replica, drawn)).square().mean() / count).backward()
        optimizer.step()
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


def test_a_replica_is_killed_in_an_all_reduce_and_comes_back(command: Command, lighthouse: str, tmp_path: Path) -> None:
    run(command, lighthouse, REPLICAS, str(HERE / "_replicas.py"), str(tmp_path))
    notes = [
        {**json.loads(line), "replica": replica}
        for replica in range(REPLICAS)
        for line in (tmp_path / f"notes{replica}").read_text().splitlines()
    ]
    lost = [note for note in notes if note.get("done") is False and note["step"] == FATAL_STEP]
    assert lost, "nobody noticed that a replica died"
    assert max(note["seconds"] for note in lost) < 2
    assert any(note["replicas"] == REPLICAS - 1 and note.get("done") for note in notes), "two went on alone"
    expected = replay(notes)
    for replica in range(REPLICAS):
        found = json.loads((tmp_path / f"weights{replica}").read_text())
        assert torch.tensor(found).sub(torch.tensor(expected)).abs().max() < 1e-12
    assert sum(note["replicas"] == REPLICAS and note["step"] > FATAL_STEP for note in notes) >= REPLICAS * TOGETHER


def test_the_example_learns_though_a_replica_is_killed(command: Command, lighthouse: str) -> None:
    begin = time.monotonic()
    found = run(command, lighthouse, 2, str(EXAMPLE), "--steps", "400", killed=1)
    assert time.monotonic() - begin < 200
    for out in found:
        match = re.search(r"after 400 steps: ([\d.]+)%", out)
        assert match is not None, out
        assert float(match[1]) > 95
