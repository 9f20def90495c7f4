"""Strangers at every port of a running job: they are turned away and logged, and the job does not notice."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator

import psutil
import pytest
from elastic_job import ElasticJob, script, total
from unidist_command import Command

from unidist.control.client import ControlClient
from unidist.control.connection import ConnectionLost
from unidist.control.server import MAX_STRANGERS
from unidist.control.wire import MAGIC, WireError

ATTACKS = (b"GET / HTTP/1.1\r\n\r\n", MAGIC * 20, b"\x80\x04]", bytes(4096), os.urandom(4096))


def ports(command: Command) -> set[tuple[str, int]]:
    """Return where processes of the job listen."""
    found = set()
    for process in command.alive():
        with contextlib.suppress(psutil.Error):
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.add((str(each.laddr.ip), int(each.laddr.port)))
    return found


@contextlib.contextmanager
def crowd(address: tuple[str, int], number: int) -> Iterator[list[socket.socket]]:
    """Connect so often, and say nothing."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(number):
            made.append(stack.enter_context(socket.create_connection(address, timeout=60)))
        yield made


def trickle(strangers: list[socket.socket], position: int) -> None:
    """Send the next byte of a true greeting by each of them that still can."""
    for stranger in strangers:
        with contextlib.suppress(OSError):
            stranger.send(MAGIC[position : position + 1], socket.MSG_DONTWAIT)


def shout(address: tuple[str, int], data: bytes) -> None:
    """Send this, and whatever the answer is, wait until the other end closes."""
    with socket.create_connection(address, timeout=60) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(4096):
            pass


def test_a_job_does_not_notice_strangers_at_its_ports(command: Command) -> None:
    events = command.folder / "events.jsonl"
    name = command.script(script())
    given = ("-np", "2", "--min-np", "2", "--event-log", str(events))
    with ElasticJob(command.start("launch", *given, sys.executable, name, "1000000", "0.02"), events) as job:
        job.wait_for(r"step 5 .*")
        launcher = psutil.Process(job.process.pid)
        before = launcher.num_fds()
        where = ports(command)
        assert where
        assert all(address == "127.0.0.1" for address, _ in where)
        for address in where:
            # The crowd comes last, for the log has an end.
            with pytest.raises((ConnectionLost, WireError)):
                ControlClient(address, b"not the secret", timeout=60).close()
            with crowd(address, 2) as slow:
                for position, data in enumerate(ATTACKS):
                    trickle(slow, position)
                    shout(address, data)
                trickle(slow, len(ATTACKS))
            with crowd(address, MAX_STRANGERS + 40) as silent:
                reached = max(int(step) for (step,) in job.said(r"step (\d+) .*"))
                job.wait_for(rf"step {reached + 200} .*")  # longer than a stranger may hold its place
                trickle(silent, 0)
        assert command.wait_until(lambda: launcher.num_fds() <= before, 30)
        (command.folder / "stop").touch()
        assert job.end() == 0, job.lines
    (steps,) = job.steps()
    assert job.totals() == {total(steps)}
    assert len(job.events("generation")) == 1
    assert job.events("lost") == []
    text = "\n".join(job.lines)
    assert "closed the connection before it proved that it knows the job's secret" in text
    assert "too many connections that have proved nothing" in text
    assert text.count("turned 127.0.0.1") <= 10 * len(where)  # a crowd does not fill the log


@pytest.mark.soak
def test_ports_of_the_engine_between_hosts_take_no_harm_from_garbage(command: Command) -> None:
    name = command.script(script(setup="import unidist_torch.engines.gloo"))
    given = ("-np", "2", "--min-np", "2", "--engine", "gloo")
    process = command.start("launch", *given, sys.executable, name, "1000000", "0.02")
    with ElasticJob(process, command.folder / "none") as job:
        job.wait_for(r"step 5 .*")
        where = ports(command)
        assert len(where) > 2
        for address in where:
            for data in ATTACKS:
                with socket.create_connection(address, timeout=60) as stranger, contextlib.suppress(OSError):
                    stranger.sendall(data)
        reached = max(int(step) for (step,) in job.said(r"step (\d+) .*"))
        job.wait_for(rf"step {reached + 50} .*")
        (command.folder / "stop").touch()
        assert job.end() == 0, job.lines
    (steps,) = job.steps()
    assert job.totals() == {total(steps)}
