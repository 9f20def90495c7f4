"""What an agent is told, and what it answers when it cannot do it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from unidist.control.messages import RELEASE
from unidist.errors import ConfigurationError
from unidist.jobs.network import interface_address
from unidist_launch.agent import order as agent_order
from unidist_launch.agent.order import AgentOrder, exported_variables
from unidist_launch.remote.hosts import agent_command, agent_error


def order(folder: Path, **changes: object) -> AgentOrder:
    fields: dict[str, object] = {
        "version": RELEASE,
        "host": 1,
        "job_id": "abc",
        "secret": "00ff" * 16,
        "port": 1,
        "index_variable": "",
        "indices": {},
        "address_variable": "",
        "launcher_addresses": ("127.0.0.1",),
        "network_interfaces": (),
        "command": ("python", "train.py", "ä b"),
        "env": {"A": "1"},
        "exported": {},
        "folder": str(folder),
        "heartbeat_sec": 5.0,
        "connect_sec": 2.0,
    }
    return AgentOrder(**{**fields, **changes})  # type: ignore[arg-type]


def agent_says(line: bytes, env: dict[str, str] | None = None) -> str:
    """Return why an agent that got this line ended."""
    done = subprocess.run(agent_command(), input=line, capture_output=True, timeout=60, env=env)
    assert done.returncode == 2, done.stderr
    assert b"Traceback" not in done.stderr
    return agent_error(done.stderr.decode())


def test_an_order_survives_its_way(tmp_path: Path) -> None:
    made = order(tmp_path)
    line = made.to_line()
    assert line.count(b"\n") == 1
    assert AgentOrder.from_line(line) == made


def test_an_order_that_goes_to_all_leaves_the_number_to_the_agents_variable(tmp_path: Path) -> None:
    assert order(tmp_path).of_this_agent({"NUMBER": "3"}).host == 1
    made = order(tmp_path, index_variable="NUMBER")
    assert made.of_this_agent({"NUMBER": "3"}).host == 3
    for environ in ({}, {"NUMBER": "x"}):
        with pytest.raises(ConfigurationError, match=r"NUMBER='x?' should tell this agent which it is"):
            made.of_this_agent(environ)
    named = order(tmp_path, index_variable="NUMBER", indices={"n1": 0, "n2": 1})
    assert AgentOrder.from_line(named.to_line()).of_this_agent({"NUMBER": "n2"}).host == 1
    with pytest.raises(ConfigurationError, match=r"NUMBER='n3' should tell this agent which it is \(n1, n2\)"):
        named.of_this_agent({"NUMBER": "n3"})


def test_another_version_is_refused_with_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = order(tmp_path).to_line()
    monkeypatch.setattr(agent_order, "RELEASE", "99.0 (protocol 7)")
    told = f"unidist 99.0 (protocol 7) is installed on host {socket.gethostname()}, but the launcher is {RELEASE}"
    with pytest.raises(ConfigurationError, match=re.escape(told)):
        AgentOrder.from_line(line)


@pytest.mark.parametrize("line", [b"", b"hello\n", b"[]\n", b"{}\n"])
def test_what_is_no_order_is_refused(line: bytes) -> None:
    with pytest.raises(ConfigurationError, match="started by `unidist launch`"):
        AgentOrder.from_line(line)


def test_variables_of_a_host_a_login_or_an_outer_job_stay_where_they_are() -> None:
    stay = (
        "HOME",
        "PWD",
        "_",
        "SSH_CONNECTION",
        "TMPDIR",
        "TERM",
        "XDG_RUNTIME_DIR",
        "UNIDIST_JOB_ID",
        "BASH_FUNC_x%%",
    )
    travel = {
        "PATH": "p",
        "PYTHONPATH": "q",
        "NCCL_DEBUG": "INFO",
        "UNIDIST_STRATEGY": "x",
        "TERMINATE": "1",
        "MY_HOME": "h",
    }
    assert exported_variables({**dict.fromkeys(stay, "x"), **travel}) == travel


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    said = agent_says(order(tmp_path / "gone").to_line())
    assert f"folder '{tmp_path / 'gone'}' cannot be entered: No such file or directory" in said


def test_a_launcher_that_cannot_be_reached_is_told_with_address_and_advice(tmp_path: Path) -> None:
    said = agent_says(order(tmp_path).to_line())
    assert "127.0.0.1:1: Connection refused" in said
    assert "--network-interface" in said


def test_the_connection_of_a_login_is_not_taken_for_that_of_the_launcher(tmp_path: Path) -> None:
    env = {**os.environ, "SSH_CONNECTION": "127.0.0.9 4000 127.0.0.1 22"}
    assert "127.0.0.9" not in agent_says(order(tmp_path).to_line(), env)
    assert "127.0.0.9:1: Connection refused; 127.0.0.1:1" in agent_says(
        order(tmp_path, address_variable="SSH_CONNECTION").to_line(), env
    )


def test_an_interface_that_is_not_there_is_told_with_those_that_are() -> None:
    assert interface_address(("no0", "lo")) == "127.0.0.1"
    with pytest.raises(ConfigurationError, match=r"network interface no0,no1 was asked for: host .* has .*lo"):
        interface_address(("no0", "no1"))


def test_a_missing_unidist_is_recognised() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-m", "unidist_launch.agent.agent"], capture_output=True, text=True, timeout=60
    )
    assert "unidist is not installed for" in agent_error(done.stderr), done.stderr
