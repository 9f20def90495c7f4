"""`unidist top`, with a real server of a status that a test has made up."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from unidist.errors import ConfigurationError
from unidist_status import file as status_file
from unidist_status.file import StatusAddress
from unidist_status.model import JobStatus
from unidist_status.server import Refused, StatusServer, StatusSource
from unidist_status.top_command import top

TOKEN = "the-token-of-this-test"


class Source(StatusSource):
    """The status of a job with a rank that is slow, and a name that would clear a terminal."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.model = JobStatus(["train.py", "[bold]\x1b[2J"], 2, now=0.0, time=1e9)
        for event, fields in (
            ("host_joined", {"host": "h1", "index": 0, "address": "10.0.0.1", "cores": 8}),
            ("started", {"worker": 0, "host": 0}),
            ("started", {"worker": 1, "host": 0}),
            ("generation", {"generation": 0, "world_size": 2, "progress": 0, "workers": [0, 1]}),
            ("lost", {"worker": 1, "rank": 1, "generation": 0, "reason": "[red]its connection ended"}),
            ("generation", {"generation": 1, "world_size": 2, "progress": 0, "workers": [0, 1]}),
        ):
            self.model.happened(event, fields, now=1.0, time=1e9)
        for second in range(4):
            for number in (0, 1):
                told = {"generation": 1, "commits": 9 * second, "timed": 9 * second, "first_step_sec": 0.5}
                self.model.beat(number, {**told, "own_sec": 9 * second * (0.1 + 0.2 * number)}, now=2.0 + second)

    def status(self) -> dict[str, Any]:
        self.num_asked += 1
        return self.model.as_fields(now=6.0)

    def log_of(self, name: str) -> list[str]:
        raise Refused(HTTPStatus.NOT_FOUND, name)

    def ask(self, action: str, name: str, client: str) -> dict[str, Any]:
        raise Refused(HTTPStatus.NOT_FOUND, name)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Source) -> Iterator[StatusServer]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    made = StatusServer(source, TOKEN, address="127.0.0.1", port=0)
    made.start()
    yield made
    made.close()


def run(*arguments: str) -> str:
    result = CliRunner().invoke(top, arguments, standalone_mode=False, catch_exceptions=False)
    return result.output


def address(server: StatusServer) -> StatusAddress:
    return StatusAddress(server.url, TOKEN, os.getpid(), ("train.py",))


def test_it_prints_ranks_recovery_and_who_is_slow(server: StatusServer) -> None:
    text = " ".join(run("--once", address(server).full_url).split())
    assert "generation 1 2 ranks" in text
    assert re.search(r"1\s+training\s+h1(\s+-){5}\s+0\s+0\.3000\s+0\.0000", text)
    assert "The others wait for rank 1: it works 0.300 s per commit, they 0.100 s." in text
    assert "Last change: rank 1 was lost: [red]its connection ended" in text
    assert "first step in 0.500 s" in text
    assert "train.py [bold][2J" in text  # its text, and nothing that a terminal would obey
    assert "\x1b" not in text


def test_it_finds_the_one_job_and_asks_which_of_several(server: StatusServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--status-port 0"):
        run("--once")
    status_file.write(status_file.default_path(), address(server))
    assert "2 ranks" in run("--once")
    assert "2 ranks" in run("--once", "--status-file", str(status_file.default_path()))
    status_file.write(tmp_path / "unidist" / "job-2.json", address(server))
    with pytest.raises(ConfigurationError, match="2 jobs of yours"):
        run("--once")


def test_wrong_addresses_are_errors_that_say_what_is_wrong(server: StatusServer) -> None:
    with pytest.raises(ConfigurationError, match="does not know this token"):
        run("--once", f"{server.url}?token=another")
    for url in ("127.0.0.1:80", "ftp://h/?token=x", server.url):
        with pytest.raises(ConfigurationError, match="is no address of a status page"):
            run("--once", url)
    with pytest.raises(ConfigurationError, match="exclude each other"):
        run("--status-file", "x", address(server).full_url)
    server.close()
    with pytest.raises(ConfigurationError, match="Has the job ended"):
        run("--once", address(server).full_url)


def test_an_answer_that_is_broken_off_is_the_end_of_a_job() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"ranks": ')

        threading.Thread(target=answer).start()
        with pytest.raises(ConfigurationError, match="broken off its answer"):
            run("--once", f"http://127.0.0.1:{listening.getsockname()[1]}/?token=x")


def test_it_follows_the_job_until_it_has_ended(server: StatusServer, source: Source) -> None:
    command = [sys.executable, "-m", "unidist_launch", "top", "--interval", "0.1", address(server).full_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while source.num_asked < 4:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        server.close()
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "generation 1  2 ranks" in out
    assert "the job has ended" in out
