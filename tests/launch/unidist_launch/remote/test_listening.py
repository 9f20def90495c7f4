"""What the processes of a job listen on: the table of SECURITY.md."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ssh_hosts import SshHosts, why_not
from unidist_command import Command

pytest.importorskip("torch", reason="parameter servers of PyTorch, and its data workers")
pytestmark = pytest.mark.parallel

SCRIPT = """
    import torch
    import unidist.torch as ud
    ud.init()
    model = torch.nn.Linear(3, 3)
    optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))[1]
    samples = torch.utils.data.TensorDataset(torch.zeros(8, 3))
    for (batch,) in ud.data_service(ud.shard(torch.utils.data.DataLoader(samples, batch_size=2))):
        model(batch).sum().backward()
        optimizer.step()
    open(f"ready{ud.rank()}", "w").close()
    while not os.path.exists("end"):
        time.sleep(0.05)
    ud.shutdown()
"""
OPTIONS = ("--strategy", "parameter_server=async:servers=2", "--data-workers", "2")


def listening(process: psutil.Process) -> set[str]:
    """Return the addresses at which a process listens, in its network namespace."""
    inodes = set()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link).removeprefix("socket:[").rstrip("]"))
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{process.pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address = bytes.fromhex(words[1].partition(":")[0])
                numbers = [address[index : index + 4][::-1] for index in range(0, len(address), 4)]
                found.add(socket.inet_ntop(family, b"".join(numbers)))
    return found


def role(process: psutil.Process) -> str:
    """Return what a process of a job is; "" for one that another has started."""
    words = process.cmdline()
    for name, part in (
        ("agent", "unidist_launch.agent"),
        ("parameter server", "unidist_parameter_server.server"),
        ("data worker", "unidist_data_service.worker"),
    ):
        if any(part in word for word in words):
            return name
    return "rank" if words[1:2] == ["script.py"] else ""


def by_role(processes: list[psutil.Process]) -> dict[str, set[str]]:
    """Return where the processes of each role listen; all have been seen."""
    found: dict[str, set[str]] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            found.setdefault(role(process), set()).update(listening(process))
    assert {"rank", "parameter server", "data worker"} <= found.keys()
    return found


@pytest.mark.parametrize("engine", ["shm", "tcp", "gloo"])
def test_nothing_of_a_job_on_one_host_can_be_reached_from_another(command: Command, engine: str) -> None:
    script = command.script(SCRIPT)
    with command.start("launch", "-np", "2", *OPTIONS, "--engine", engine, sys.executable, script) as launcher:
        try:
            assert command.wait_until(lambda: all((command.folder / f"ready{rank}").exists() for rank in (0, 1)), 120)
            here = psutil.Process(launcher.pid)
            found = by_role(here.children(recursive=True))
            assert set().union(*found.values(), listening(here)) <= {"127.0.0.1", "::1"}
        finally:
            (command.folder / "end").touch()
            launcher.communicate(timeout=60)
    assert launcher.returncode == 0


@pytest.fixture(scope="module")
def hosts() -> Iterator[SshHosts]:
    with SshHosts(2) as made:
        yield made


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")
@pytest.mark.parametrize("engine", ["tcp", "gloo"])
def test_processes_on_several_hosts_listen_at_the_address_of_their_host_only(
    command: Command, hosts: SshHosts, engine: str
) -> None:
    script = command.script(SCRIPT)
    where = ("-H", "h1:1,h2:1", "--ssh-command", hosts.ssh_command, "--engine", engine)
    with command.start("launch", "-np", "2", *where, *OPTIONS, sys.executable, script) as launcher:
        try:
            assert command.wait_until(lambda: all((command.folder / f"ready{rank}").exists() for rank in (0, 1)), 120)
            for name, address in zip(("h1", "h2"), hosts.addresses, strict=True):
                found = by_role(hosts.processes(name))
                assert set().union(*found.values()) == {address}, found
            assert listening(psutil.Process(launcher.pid)) <= {"0.0.0.0", "::"}  # its one port, for all hosts
        finally:
            (command.folder / "end").touch()
            launcher.communicate(timeout=60)
    assert launcher.returncode == 0
