"""Connecting to a control server that is not there, or just ends."""

from __future__ import annotations

import select
import socket
import struct
from typing import Any

import pytest

from unidist.control.client import connect
from unidist.control.connection import ConnectionClosed

_RESET = struct.pack("ii", 1, 0)


def test_a_server_that_ends_before_it_accepts_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.create_connection

    def reset_at_once(address: Any, timeout: float) -> socket.socket:
        """Connect, and come back when the server has reset the connection: elsewhere only chance does that."""
        made = real(address, timeout=timeout)
        accepted, _ = server.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        accepted.close()
        poller = select.poll()
        poller.register(made, select.POLLIN)
        assert poller.poll(30_000)
        return made

    monkeypatch.setattr(socket, "create_connection", reset_at_once)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(ConnectionClosed):
        connect(server.getsockname(), b"secret", timeout=30)


def test_where_nobody_listens_the_connection_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(ConnectionClosed):
        connect(address, b"secret", timeout=30)
