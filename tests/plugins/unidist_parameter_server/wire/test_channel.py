"""Arrays between two ends."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np

from unidist_parameter_server.wire import ArrayChannel
from unidist_parameter_server.wire.messages import Flush

SECRET = b"s" * 32


def test_arrays_follow_a_message() -> None:
    arrays: list[Any] = [np.arange(100_000, dtype=np.float32), np.ones((3, 5)), np.empty(0)]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send() -> None:
            other = ArrayChannel(listener.accept()[0], SECRET, is_server=True, timeout_sec=10)
            other.send_with(Flush(), arrays[:1], timeout_sec=10)
            other.send_arrays(arrays[1:], timeout_sec=10)
            other.close()

        thread = threading.Thread(target=send)
        thread.start()
        own = ArrayChannel.connect(listener.getsockname(), SECRET, timeout_sec=10)
        assert own.receive(timeout_sec=10) == Flush()
        for array in arrays:
            found = np.full_like(array, -1)
            own.receive_array(found, timeout_sec=10)
            assert np.array_equal(found, array)
        thread.join()
        own.close()
