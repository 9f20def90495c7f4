"""A connection between a worker and a server, or two servers, on which arrays follow messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unidist.control import Channel, Message

Array = np.ndarray[Any, np.dtype[Any]]


class ArrayChannel(Channel):
    """See `Channel`; arrays are contiguous, and the other end knows their number and sizes from the message before."""

    def send_with(self, message: Message, arrays: Sequence[Array], *, timeout_sec: float) -> None:
        """Send a message and arrays behind it. As `send`."""
        self.send(message, [*map(_bytes_of, arrays)], timeout_sec=timeout_sec)

    def send_arrays(self, arrays: Sequence[Array], *, timeout_sec: float) -> None:
        """Send arrays that an earlier message has announced. As `send`."""
        self.send_bytes([*map(_bytes_of, arrays)], timeout_sec=timeout_sec)

    def receive_array(self, array: Array, *, timeout_sec: float) -> None:
        """Fill an array with the next bytes. As `receive`."""
        self.receive_into(_bytes_of(array), timeout_sec=timeout_sec)


def _bytes_of(array: Array) -> memoryview:
    return array.data.cast("B") if array.size else memoryview(b"")
