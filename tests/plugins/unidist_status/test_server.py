"""The server of the status page, asked by real requests: who may see, who may press, and who is cut off."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from unidist.errors import ConfigurationError
from unidist_status import server as status_server
from unidist_status.server import Refused, StatusServer, StatusSource

TOKEN = "the-token-of-this-test"


class Source(StatusSource):
    """A job of rank 0 that notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []

    def status(self) -> dict[str, Any]:
        return {"ranks": [], "command": ["<script>alert(1)</script>"]}

    def log_of(self, name: str) -> list[str]:
        if name != "0":
            raise Refused(HTTPStatus.NOT_FOUND, f"there is no rank {name!r} now")
        return ["one", "<b>two</b>", "caf\u00e9"]

    def ask(self, action: str, name: str, client: str) -> dict[str, Any]:
        self.asked.append((action, name, client))
        return {"action": action}


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def server(source: Source) -> Iterator[StatusServer]:
    before = threading.active_count()
    made = StatusServer(source, TOKEN, address="127.0.0.1", port=0)
    made.start()
    yield made
    made.close()
    assert threading.active_count() == before


def ask(
    server: StatusServer, path: str, *, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, str, Any]:
    """Return status, text and headers of an answer."""
    request = urllib.request.Request(server.url + path, method=method, headers=headers, data=body)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode(), exc.headers


def bearer(token: str = TOKEN) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def raw(server: StatusServer, data: bytes) -> bytes:
    """Send bytes, and return what comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        received = b""
        try:
            connection.sendall(data)
            while part := connection.recv(65536):
                received += part
        except OSError:  # it closed while we were sending
            pass
        return received


@pytest.mark.parametrize("path", ["", "status.json", "metrics", "logs/0", "nothing", "?token=", "?token=wrong"])
def test_without_the_token_nothing_is_shown(server: StatusServer, path: str) -> None:
    for headers in ({}, bearer("wrong"), bearer(""), {"Authorization": f"Basic {TOKEN}"}, {"Cookie": f"token={TOKEN}"}):
        status, text, answered = ask(server, path, **headers)
        assert status == 401
        assert "alert" not in text
        assert answered["WWW-Authenticate"] == "Bearer"


def test_the_token_opens_what_can_be_seen(server: StatusServer) -> None:
    for headers, query in ((bearer(), ""), ({}, f"?token={TOKEN}")):
        status, text, answered = ask(server, "status.json" + query, **headers)
        assert (status, answered["Content-Type"]) == (200, "application/json")
        assert json.loads(text)["ranks"] == []
        assert answered["Cache-Control"] == "no-store"
        status, text, answered = ask(server, "logs/0" + query, **headers)
        assert (status, text) == (200, "one\n<b>two</b>\ncaf\u00e9\n")
        assert answered["Content-Type"].startswith("text/plain")
        assert answered["X-Content-Type-Options"] == "nosniff"
    assert ask(server, "logs/1", **bearer())[0] == 404
    assert ask(server, "logs/..%2f..%2fetc", **bearer())[0] == 404
    assert ask(server, "nothing", **bearer())[0] == 404


def test_the_pages_cookie_opens_the_page_and_nothing_else(server: StatusServer) -> None:
    status, page, headers = ask(server, f"?token={TOKEN}")
    assert status == 200
    assert "<table" in page
    assert TOKEN not in page
    assert "script-src 'nonce-" in headers["Content-Security-Policy"]
    cookie, *attributes = headers["Set-Cookie"].split("; ")
    assert TOKEN not in cookie
    assert {"HttpOnly", "SameSite=Lax"} <= set(attributes)
    assert ask(server, "", Cookie=cookie)[0] == 200
    for path in ("status.json", "metrics", "logs/0"):
        assert ask(server, path, Cookie=cookie)[0] == 401
    assert ask(server, "kill/0", method="POST", Cookie=cookie)[0] == 401
    name, _, value = cookie.partition("=")
    assert ask(server, "", Cookie=f"{name}=x{value}")[0] == 401


def test_buttons_need_the_header(server: StatusServer, source: Source) -> None:
    for path in ("kill/0", "stacks/0"):
        assert ask(server, path, method="POST")[0] == 401
        assert ask(server, f"{path}?token={TOKEN}", method="POST")[0] == 401
        assert ask(server, path, method="POST", **bearer("wrong"))[0] == 401
        assert ask(server, path, **bearer())[0] == 404  # not by GET
    assert source.asked == []
    assert ask(server, "kill/0", method="POST", body=b"x=1", **bearer())[0] == 413
    assert ask(server, "explode/0", method="POST", **bearer())[0] == 404
    assert source.asked == []
    status, text, _ = ask(server, "kill/0", method="POST", **bearer())
    assert (status, json.loads(text)) == (202, {"action": "kill"})
    assert source.asked == [("kill", "0", "127.0.0.1")]


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\xff" * 100 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % i for i in range(1000)) + b"\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"BREW / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nCookie: \xff\xfe=;;;=\r\nAuthorization: Bearer \xff\r\n\r\n",
        b"",
    ],
)
def test_garbage_is_refused_and_the_next_is_served(
    server: StatusServer, data: bytes, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_server._Handler, "timeout", 1.0)
    answer = raw(server, data)
    assert b" 200 " not in answer.split(b"\r\n")[0]
    assert ask(server, "status.json", **bearer())[0] == 200
    assert capfd.readouterr() == ("", "")  # they are the job's


def test_slow_clients_are_cut_off_and_too_many_turned_away(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_server, "TOTAL_SEC", 1.0)
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(40)]
    ended = 0
    deadline = time.monotonic() + 60
    while ended < len(idle) and time.monotonic() < deadline:
        ended = 0
        for connection in idle:
            connection.setblocking(False)
            try:
                connection.send(b"G")  # one byte after the other: it is never silent
                ended += connection.recv(1) == b""
            except BlockingIOError:
                pass
            except OSError:
                ended += 1
        time.sleep(0.05)
    for connection in idle:
        connection.close()
    assert ended == len(idle)
    while (status := _status_or_none(server)) is None:
        assert time.monotonic() < deadline
    assert status == 200


def _status_or_none(server: StatusServer) -> int | None:
    try:
        return ask(server, "status.json", **bearer())[0]
    except OSError:  # the threads of those that were cut off have not ended yet
        return None


def test_closing_does_not_wait_for_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_server, "READ_SEC", 90.0)
    monkeypatch.setattr(status_server._Handler, "timeout", 90.0)
    server = StatusServer(Source(), TOKEN, address="127.0.0.1", port=0)
    server.start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"GET / HT")
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 30
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""


def test_an_address_that_cannot_be_listened_on_is_an_error_of_the_command(server: StatusServer) -> None:
    with pytest.raises(ConfigurationError, match=f"--status-port {server.port}"):
        StatusServer(Source(), TOKEN, address="127.0.0.1", port=server.port)
    with pytest.raises(ConfigurationError, match="--status-address"):
        StatusServer(Source(), TOKEN, address="203.0.113.1", port=0)


def test_the_page_loads_nothing_from_elsewhere() -> None:
    page = (Path(status_server.__file__).parent / "page" / "page.html").read_text()
    assert "http://" not in page
    assert "https://" not in page
    assert "innerHTML" not in page
