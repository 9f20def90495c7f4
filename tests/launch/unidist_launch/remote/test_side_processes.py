"""Processes beside the ranks of a job over real ssh, and hosts that are lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ssh_hosts import SshHosts, why_not

pytestmark = [pytest.mark.parallel, pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")]

_TIMEOUT_SEC = 90
_HEARTBEAT_SEC = 2.0
_HEAD = """
import os, signal, socket, sys, time
from datetime import timedelta
from pathlib import Path
from unidist.control import job_values
rank = int(os.environ.get("RANK", -1))
values = job_values()
"""
_SERVER = """
index, address = os.environ["UNIDIST_ROLE_INDEX"], os.environ["UNIDIST_HOST_ADDRESS"]
assert rank == -1
values.set(f"server/{index}", f"{socket.gethostname()} {address}".encode())
time.sleep(300)
"""
_RANK = """
print(rank, *(each.decode() for each in values.wait(["server/0", "server/1"], timedelta(seconds=60))), flush=True)
Path(f"ready{rank}").touch()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[SshHosts]:
    with SshHosts(2) as made:
        yield made


class Jobs:
    """Runs jobs of four ranks and two servers on two hosts, in a folder of its own."""

    def __init__(self, folder: Path, hosts: SshHosts) -> None:
        self.folder = folder
        self.hosts = hosts

    def start(self, rank: str, *, is_vital: bool = False, **more: Any) -> subprocess.Popen[str]:
        """Start a job."""
        for name, script in (("rank.py", rank), ("server.py", _SERVER)):
            (self.folder / name).write_text(_HEAD + textwrap.dedent(script))
        server = {"command": [sys.executable, "server.py"], "role": "ps", "is_vital": is_vital}
        job = {
            "path": "unidist_launch.launchers.ssh:SshLauncher",
            "command": [sys.executable, "rank.py"],
            "num_proc": 4,
            "hosts": [("h1", 2), ("h2", 2)],
            "output_dir": "",
            "env": {},
            "ssh": self.hosts.ssh_command,
            "heartbeat_sec": _HEARTBEAT_SEC,
            "side_processes": [{**server, "index": index} for index in range(2)],
            **more,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "unidist.testing._launcher_side", json.dumps(job)],
            cwd=self.folder,
            env=dict(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_ranks(self) -> None:
        """Wait until all ranks have found the servers."""
        assert _wait_until(lambda: all((self.folder / f"ready{rank}").exists() for rank in range(4)), 60)

    def are_empty(self, *names: str) -> bool:
        """Return whether nothing but sshd runs on these hosts, soon."""
        return _wait_until(lambda: not any(self.hosts.processes(name) for name in names), 60)


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def jobs(tmp_path: Path, hosts: SshHosts) -> Jobs:
    return Jobs(tmp_path, hosts)


def test_servers_are_spread_over_the_hosts_and_found_by_all_ranks(jobs: Jobs) -> None:
    with jobs.start(_RANK) as launcher:
        out, err = launcher.communicate(timeout=_TIMEOUT_SEC)
    assert launcher.returncode == 0, err
    first, second = jobs.hosts.addresses
    assert sorted(out.splitlines()) == [f"[{rank}] {rank} h1 {first} h2 {second}" for rank in range(4)]
    assert jobs.are_empty("h1", "h2")


def test_nothing_is_left_on_any_host_after_kill_9_of_the_launcher(jobs: Jobs) -> None:
    with jobs.start(_RANK + "time.sleep(300)") as launcher:
        jobs.wait_for_ranks()
        launcher.send_signal(signal.SIGKILL)
        launcher.communicate(timeout=_TIMEOUT_SEC)
    assert jobs.are_empty("h1", "h2")


def test_a_job_that_may_lose_ranks_goes_on_without_a_host(jobs: Jobs) -> None:
    rank = _RANK + "while not Path('lost').exists(): time.sleep(0.05)\nprint('end', rank, flush=True)"
    with jobs.start(rank, outlives_ranks=True) as launcher:
        jobs.wait_for_ranks()
        jobs.hosts.link("h2", "down")
        try:
            told = ""
            assert launcher.stderr is not None
            for line in launcher.stderr:
                told += line
                if "ps 1" in line:
                    break
            (jobs.folder / "lost").touch()
            out, err = launcher.communicate(timeout=_TIMEOUT_SEC)
        finally:
            jobs.hosts.link("h2", "up")
    assert launcher.returncode == 0, told + err
    for number in (2, 3):
        assert f"rank {number} is lost (host h2 was lost: " in told
    assert "ps 1 has ended before the ranks" in told
    assert [line for line in sorted(out.splitlines()) if "end" in line] == ["[0] end 0", "[1] end 1"]
    assert jobs.are_empty("h1", "h2")


def test_a_vital_server_whose_host_is_lost_ends_the_job(jobs: Jobs) -> None:
    with jobs.start(_RANK + "time.sleep(300)", outlives_ranks=True, is_vital=True) as launcher:
        jobs.wait_for_ranks()
        jobs.hosts.link("h2", "down")
        try:
            _, err = launcher.communicate(timeout=_TIMEOUT_SEC)
        finally:
            jobs.hosts.link("h2", "up")
    assert launcher.returncode == 1, err
    assert "the job has ended: ps 1 has failed" in err
    assert "its host was lost" in err
    assert jobs.are_empty("h1", "h2")
