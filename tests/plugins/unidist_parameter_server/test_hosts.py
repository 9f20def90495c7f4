"""Servers and workers on several hosts over real ssh, and a host that is lost with its worker and its server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ssh_hosts import SshHosts, why_not

pytest.importorskip("torch")
pytestmark = [pytest.mark.parallel, pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")]

_TRAIN = """
import os, socket, time
import torch
import unidist.torch as ud

def gradient(rank, step):
    return torch.randint(-1000, 1000, (64,), generator=torch.Generator().manual_seed(1000 * step + rank)).double()

ud.init()
weights = torch.nn.Parameter(torch.zeros(64, dtype=torch.float64))
optimizer = ud.distribute(torch.nn.ParameterList([weights]), torch.optim.SGD([weights], lr=1.0))[1]

def push(gradient):
    optimizer.zero_grad()
    (weights * gradient).sum().backward()
    optimizer.step()

for step in range(15):
    push(gradient(ud.rank(), step))
open(f"half.{ud.rank()}", "w").close()
while not os.path.exists("go on"):
    time.sleep(0.01)
begun = time.monotonic()
for step in range(15, 40):
    push(gradient(ud.rank(), step))
print("took", time.monotonic() - begun, flush=True)
if os.path.exists("lost"):
    counts = [40, 15]
else:
    ud.barrier()
    counts = [40, 40]
push(torch.zeros(64))
expected = -sum(gradient(rank, step) for rank in range(2) for step in range(counts[rank]))
print("exact", ud.rank(), socket.gethostname(), bool((weights.detach() == expected).all()), flush=True)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[SshHosts]:
    with SshHosts(2) as made:
        yield made


def _start(hosts: SshHosts, folder: Path, strategy: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(_TRAIN)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "unidist_launch", "launch", "-np", "2", "-H", "h1:1,h2:1", "--timeout", "60"),
            *("--ssh-command", hosts.ssh_command, "--strategy", strategy, "train.py"),
        ],
        cwd=folder,
        env={**os.environ, "UNIDIST_HEARTBEAT_SEC": "3"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_for(files: list[Path], job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while not all(file.exists() for file in files):
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_workers_of_two_hosts_push_to_servers_of_both(hosts: SshHosts, tmp_path: Path) -> None:
    (tmp_path / "go on").touch()
    with _start(hosts, tmp_path, "parameter_server=async:scale=none:shard_size=64B:servers=2") as job:
        out, err = job.communicate(timeout=90)
    assert job.returncode == 0, err
    assert "exact 0 h1 True" in out, out
    assert "exact 1 h2 True" in out, out


def test_a_host_is_lost_with_its_worker_and_its_server(hosts: SshHosts, tmp_path: Path) -> None:
    strategy = "parameter_server=async:scale=none:shard_size=64B:servers=2:replicas=1"
    with _start(hosts, tmp_path, strategy) as job:
        try:
            _wait_for([tmp_path / "half.0", tmp_path / "half.1"], job)
            hosts.crash("h2")
            (tmp_path / "lost").touch()
            (tmp_path / "go on").touch()
            out, err = job.communicate(timeout=90)
        finally:
            job.kill()
            hosts.restart("h2")
    assert job.returncode == 0, err
    assert "exact 0 h1 True" in out, out + err
    assert "takes over the parameters of server 1" in err
    (took,) = [float(line.split("took")[1]) for line in out.splitlines() if "took" in line]
    assert took < 30  # half of its --timeout
