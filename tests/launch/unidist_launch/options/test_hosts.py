"""Which hosts a job runs on, and which rank stands where."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from unidist.errors import ConfigurationError
from unidist.launcher import Host
from unidist.topology import Topology
from unidist_launch.options.hosts import is_local, own_names, parse, places, read_hostfile, used


def test_a_host_is_known_by_its_short_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.example.org")
    assert own_names() == ["localhost", "127.0.0.1", "node7.example.org", "node7"]
    assert all(is_local(Host(name, 1)) for name in own_names())
    assert not is_local(Host("node8", 1))


def test_a_list_is_read_in_order_and_a_host_named_twice_has_both_slots() -> None:
    assert parse("h2:1, user@h1.x-y.org:12,h2:2") == (Host("h2", 3), Host("user@h1.x-y.org", 12))


@pytest.mark.parametrize(
    "text",
    ["", "localhost", "localhost:", "localhost:-2", "localhost:0", "localhost:2,,", "local host:2", "-oX:2", "h;x:1"],
)
def test_what_cannot_be_read_is_an_error_that_shows_the_form(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"HOST:SLOTS,HOST:SLOTS, for example -H localhost:2\."):
        parse(text)


def test_a_file_is_read_as_horovods(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\nh1 slots=4\n\nh2\tslots = 2  # the small one\n")
    assert read_hostfile(path) == (Host("h1", 4), Host("h2", 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [("h1 slots=1\nh2\n", "line 2: 'h2' cannot be read"), ("h1 slots=x", "line 1"), ("# none\n", "names no host")],
)
def test_what_is_wrong_in_a_file_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_hostfile(path)


def test_hosts_are_filled_in_order_and_the_rest_is_left_out() -> None:
    hosts = (Host("h1", 2), Host("h2", 3), Host("h3", 1))
    assert used(hosts, 4) == (Host("h1", 2), Host("h2", 2))
    with pytest.raises(ConfigurationError, match="-np 7 needs 7 slots, but h1:2,h2:3,h3:1 gives 6"):
        used(hosts, 7)


def test_ranks_of_a_host_are_consecutive_and_know_their_place() -> None:
    assert places((Host("h1", 1), Host("h2", 2))) == [
        (Topology(0, 3, 0, 1, 0, 2),),
        (Topology(1, 3, 0, 2, 1, 2), Topology(2, 3, 1, 2, 1, 2)),
    ]
