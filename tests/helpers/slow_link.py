"""A network link that delays and loses packets, between a network namespace and a bridge.

Run as a program:

    slow_link.py NAMESPACE OUTER DELAY_MS LOSS SEED

It makes the device `eth0` in the namespace and OUTER in its own, passes frames between them after a delay, and loses
some. It needs /dev/net/tun and root, and nothing else of the kernel: `tc netem` does the same, where it is built in.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_TAP, _WITHOUT_HEADER = 0x0002, 0x1000
_FRAME_BYTES = 65536
_MAX_WAITING = 10_000
"""Frames on their way in one direction; more are lost, as in a router."""


def why_not() -> str:
    """Return why such a link cannot be made here; "" if it can."""
    return "" if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "there is no /dev/net/tun"


def _open_device(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _WITHOUT_HEADER))
    return descriptor


def _enter(namespace: str) -> None:
    descriptor = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(descriptor)


def run(outside: int, inside: int, delay: float, loss: float, seed: int) -> None:
    """Pass frames on until this process is ended."""
    chance = random.Random(seed)
    waiting: dict[int, deque[tuple[float, bytes]]] = {outside: deque(), inside: deque()}  # by where they go
    other = {outside: inside, inside: outside}
    while True:
        next_due = min((queue[0][0] for queue in waiting.values() if queue), default=None)
        timeout = None if next_due is None else max(0.0, next_due - time.monotonic())
        readable, _, _ = select.select([outside, inside], [], [], timeout)
        for source in readable:
            while True:
                try:
                    frame = os.read(source, _FRAME_BYTES)
                except BlockingIOError:
                    break
                except OSError:  # the device is down
                    time.sleep(0.001)
                    break
                queue = waiting[other[source]]
                if chance.random() >= loss and len(queue) < _MAX_WAITING:
                    queue.append((time.monotonic() + delay, frame))
                if len(queue) % 64 == 63:
                    break  # what is due goes first
        now = time.monotonic()
        for target, queue in waiting.items():
            while queue and queue[0][0] <= now:
                with contextlib.suppress(OSError):  # the device is down, or full: the frame is lost
                    os.write(target, queue.popleft()[1])


def main() -> None:
    """Make the devices, and say so on standard output."""
    namespace, outer, delay_ms, loss, seed = sys.argv[1:]
    outside = _open_device(outer)
    _enter(namespace)
    inside = _open_device("eth0")
    print("ready", flush=True)
    run(outside, inside, float(delay_ms) / 1000, float(loss), int(seed))


if __name__ == "__main__":
    main()
