"""Which ports of a job on one host another machine can reach: none, whatever moves the data."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
import ssh_hosts
from ssh_hosts import SshHosts
from unidist_command import Command

pytest.importorskip("torch", reason="the engine gloo is PyTorch's")
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(ssh_hosts.why_not()), reason=ssh_hosts.why_not() or "hosts can be made"),
]

SCRIPT = """
import unidist.torch as ud
ud.init()
print("up", flush=True)
time.sleep(100)
"""
KNOCK = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), timeout=5).close()
        print(port)
    except ConnectionRefusedError:
        pass
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[SshHosts]:
    with SshHosts(1) as made:
        yield made


def listening(command: Command) -> set[int]:
    """Return the ports on which the processes of a job listen."""
    processes = [psutil.Process(each.pid) for each in command.alive()]
    found = [item for process in processes for item in process.net_connections("tcp")]
    return {item.laddr.port for item in found if item.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("options", [(), ("--min-np", "1", "--status-port", "0")], ids=["fixed", "elastic"])
def test_from_another_machine_nothing_answers(command: Command, hosts: SshHosts, options: tuple[str, ...]) -> None:
    name = command.script(SCRIPT)
    with command.start("launch", "-np", "2", "--engine", "gloo", *options, sys.executable, name) as process:
        try:
            assert process.stdout is not None
            line = ""
            while "up" not in line:  # the launcher folds what both print
                line = process.stdout.readline()
                assert line
            time.sleep(0.5)
            ports = listening(command)
            assert len(ports) >= 3  # the store, and gloo on both ranks
            knock = shlex.join([sys.executable, "-c", KNOCK, hosts.gateway, *map(str, ports)])
            there = [*shlex.split(hosts.ssh_command), "h1", knock]
            answered = subprocess.run(there, capture_output=True, text=True, timeout=60, check=True).stdout.split()
        finally:
            process.terminate()
            process.wait(60)
    assert answered == []
