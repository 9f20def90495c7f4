"""The world of threads, and with it every collective made from messages, against the contract of communicators."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from unidist.communicator import Communicator
from unidist.testing import CommunicatorConformance, ThreadWorld


class _Worlds:
    """Gives the thread of each rank its communicators, as `Connector` does for processes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._worlds: dict[str, ThreadWorld] = {}

    def of_rank(self, rank: int) -> _Connector:
        return _Connector(self, rank)

    def communicator(self, name: str, rank: int, timeout: timedelta) -> Communicator:
        with self._lock:
            world = self._worlds.setdefault(name, ThreadWorld(self._size, timeout=timeout))
        return world.communicators[rank]


class _Connector:
    def __init__(self, worlds: _Worlds, rank: int) -> None:
        self._worlds, self._rank = worlds, rank

    def connect(self, name: str = "", *, timeout: timedelta | None = None) -> Communicator:
        return self._worlds.communicator(name, self._rank, timeout or timedelta(seconds=40))

    def close(self, communicator: Communicator) -> None:
        communicator.close()


class TestThreadWorld(CommunicatorConformance):
    engine = "threads"
    sizes = (1, 3)
    detects_mismatch = False
    names_missing_ranks = False  # a collective is a chain of messages: the missing link may be a waiting rank
    in_processes = False
    seeds = (1,)

    def run(self, size: int, case: Callable[..., Any], *args: Any) -> list[Any]:
        with ThreadWorld(size) as world:
            return world.run(lambda communicator: case(communicator, *args))

    def run_connecting(self, size: int, case: Callable[..., Any], *args: Any) -> list[Any]:
        worlds = _Worlds(size)
        with ThreadWorld(size) as ranks:
            return ranks.run(lambda communicator: case(worlds.of_rank(communicator.rank), *args))
