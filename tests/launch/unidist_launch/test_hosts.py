"""`-H`: this host, by any of its names."""

from __future__ import annotations

import socket

import pytest

from unidist.errors import ConfigurationError
from unidist_launch.hosts import check_hosts, own_names


def test_a_host_is_known_by_its_short_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.example.org")
    assert own_names() == ["localhost", "127.0.0.1", "node7.example.org", "node7"]
    for name in own_names():
        check_hosts(f"{name}:2", 2)
    check_hosts("node7:1, localhost:1", 2)


@pytest.mark.parametrize("text", ["", "localhost", "localhost:", "localhost:-2", "localhost:2,,", "local host:2"])
def test_what_cannot_be_read_is_an_error_that_shows_the_form(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"-H localhost:2\."):
        check_hosts(text, 2)


def test_another_host_is_named() -> None:
    with pytest.raises(ConfigurationError, match="'elsewhere' is not this one"):
        check_hosts("elsewhere:8", 2)
