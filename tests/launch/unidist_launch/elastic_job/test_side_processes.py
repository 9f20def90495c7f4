"""Processes beside the ranks of an elastic job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from unidist_command import Command

pytestmark = pytest.mark.parallel

_TIMEOUT_SEC = 90
_SERVER = """
    from datetime import timedelta
    from unidist.control import job_values
    values, pid = job_values(), os.getpid()
    values.set("server", str(pid).encode())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("asked to end", pid, flush=True)))
    print("serving", flush=True)
    while True:
        time.sleep(0.1)
"""
_TRAIN = """
    from datetime import timedelta
    from pathlib import Path
    from unidist.control import job_values
    server = int(job_values().wait(["server"], timedelta(seconds=60))[0])
    worker = os.environ["UNIDIST_WORKER"]
    assert "UNIDIST_ROLE" not in os.environ
    os.kill(server, 0)
    print("worker", worker, "knows", server, flush=True)
    if worker == "1":
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    while worker == "0" and not Path("second").exists():
        time.sleep(0.05)
    if worker == "2":
        Path("second").touch()
"""


def _start(unidist: Command, rank: str, *, beside: str, hosts: list[Any], **more: Any) -> subprocess.Popen[str]:
    job = {
        "path": "unidist_launch.launchers.elastic:ElasticLauncher",
        "command": [sys.executable, unidist.script(rank, "train.py")],
        "num_proc": 2,
        "hosts": hosts,
        "output_dir": "",
        "env": {},
        "elastic": [1, 2],
        "side_processes": [
            {"command": [sys.executable, unidist.script(beside, "server.py")], "role": "ps", "index": 0, **more}
        ],
    }
    words = [sys.executable, "-m", "unidist.testing._launcher_side", json.dumps(job)]
    return unidist.start_words(words, env=dict(os.environ))


def test_a_server_outlives_lost_workers_and_is_ended_after_the_ranks(command: Command) -> None:
    with _start(command, _TRAIN, beside=_SERVER, hosts=[("localhost", 2)]) as process:
        out, err = process.communicate(timeout=_TIMEOUT_SEC)
    assert process.returncode == 0, err
    assert err.count("[ps 0] serving") == 1
    pids = {line.split()[-1] for line in out.splitlines() if " knows " in line}
    assert len(pids) == 1, out
    assert f"[ps 0] asked to end {pids.pop()}" in err


def test_the_failure_of_a_vital_server_ends_the_job(command: Command) -> None:
    server = "time.sleep(1); sys.exit(3)"
    with _start(
        command, "time.sleep(300)", beside=server, hosts=[("localhost", 1), ("127.0.0.1", 1)], is_vital=True, host=1
    ) as process:
        _, err = process.communicate(timeout=_TIMEOUT_SEC)
    assert process.returncode == 1, err
    assert "ps 0 has failed" in err, err
    assert "exit code 3" in err, err


def test_nothing_is_left_when_the_launcher_is_killed(command: Command) -> None:
    with _start(command, "time.sleep(300)", beside=_SERVER, hosts=[("localhost", 2)]) as process:
        assert process.stderr is not None
        assert any("[ps 0] serving" in line for line in process.stderr)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert command.wait_until(lambda: not command.alive(), 30)


def test_a_server_that_cannot_be_started_is_an_error(command: Command) -> None:
    with _start(
        command, "time.sleep(300)", beside="", hosts=[("localhost", 2)], command=["/no/such/program"]
    ) as process:
        _, err = process.communicate(timeout=_TIMEOUT_SEC)
    assert process.returncode == 98, err
    assert "/no/such/program" in err
