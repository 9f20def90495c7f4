"""How ssh is called, and what its failures mean. What the hosts do then: test_remote_run.py and tests/parallel."""

from __future__ import annotations

from pathlib import Path

import pytest

from unidist.errors import ConfigurationError
from unidist.launcher import Host, RemoteShell
from unidist_launch.remote.ssh import SshAgents

HOST = Host("node1", 4)


def test_one_call_with_the_users_own_options(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("")
    command = SshAgents(RemoteShell("ssh -F 'my config'", port=2222, identity_file=key)).command(HOST)
    assert command[:3] == ["ssh", "-F", "my config"]
    assert " ".join(command[3:-2]) == f"-o BatchMode=yes -o ConnectTimeout=10 -T -p 2222 -i {key}"
    assert command[-2] == "node1"
    assert command[-1].endswith("-m unidist_launch.agent.agent")
    assert {"-p", "-i"}.isdisjoint(SshAgents(RemoteShell("ssh")).command(HOST))


@pytest.mark.parametrize(
    ("shell", "message"),
    [
        (RemoteShell("no-such-ssh -v"), "there is no such program here"),
        (RemoteShell(""), "there is no such program here"),
        (RemoteShell("ssh 'x"), "cannot be read"),
        (RemoteShell("ssh", identity_file=Path("no_key")), "'no_key' does not exist"),
    ],
)
def test_what_cannot_be_called_is_told(shell: RemoteShell, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SshAgents(shell)


@pytest.mark.parametrize(
    ("code", "text", "meaning"),
    [
        (255, "ssh: Could not resolve hostname node1: Name or service not known", "no host of this name"),
        (255, "ssh: connect to host node1 port 22: Connection refused", "no ssh server listens there"),
        (255, "ssh: connect to host node1 port 22: Connection timed out", "it does not answer"),
        (255, "ssh: connect to host node1 port 22: No route to host", "no way to it in the network"),
        (255, "me@node1: Permission denied (publickey,password).", "`ssh node1 true` work first"),
        (255, "No ED25519 host key is known.\nHost key verification failed.", "connect once by hand: `ssh node1`"),
        (127, "sh: 1: exec: /x/python: not found", "does not exist there"),
        (126, "Permission denied", "cannot be run"),
        (1, "/x/python: No module named unidist_launch", "unidist is not installed"),
        (2, "banner\nunidist-agent: error: folder 'x' cannot be entered", "folder 'x' cannot be entered"),
        (255, "kex_exchange_identification: banana", "exit code 255: kex_exchange_identification: banana"),
        (1, "", "exit code 1: it wrote nothing"),
    ],
)
def test_a_failure_is_told_in_words_that_say_what_to_do(code: int, text: str, meaning: str) -> None:
    assert meaning in SshAgents(RemoteShell("ssh")).explain(HOST, code, text)
