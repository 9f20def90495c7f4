"""The simulators of one job, as its launcher sees them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from benchmarks.control_plane.hosts import ADDRESS
from benchmarks.control_plane.requests import EndWorker, Exchange, StartHost, Stats
from benchmarks.jobs import ROOT
from unidist.control.codec import Message, encode
from unidist.launcher import Host
from unidist_launch.remote import AgentStarter


@dataclass(frozen=True)
class Totals:
    """What the workers of all simulators have noted; see `Record`. A pair is a number of workers, and the last time."""

    assigned: dict[int, tuple[int, float]]
    met: dict[int, tuple[int, float]]
    ended: dict[int, tuple[int, float]]
    exchanged: dict[int, tuple[int, float]]
    signalled: tuple[int, float]
    errors: tuple[str, ...]
    cpu: float
    resident: float


class Simulators(AgentStarter):
    """Starts the agents of simulated hosts, divided over processes. A context manager.

    Args:
        number: of processes.
    """

    comes_by_itself = True
    tells_termination = False
    exports = False
    addresses = (ADDRESS,)

    def __init__(self, number: int) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.control_plane.simulator"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
            )
            for _ in range(number)
        ]
        self._lock = threading.Lock()
        self._turn = 0

    def __enter__(self) -> Simulators:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def totals(self) -> Totals:
        """Ask all of them what has happened."""
        found = [self._ask(process, Stats()) for process in self._alive()]

        def sums(name: str) -> dict[int, tuple[int, float]]:
            merged: dict[int, tuple[int, float]] = {}
            for stats in found:
                for generation, (count, last) in stats[name].items():
                    before = merged.get(int(generation), (0, 0.0))
                    merged[int(generation)] = before[0] + count, max(before[1], last)
            return merged

        signalled = [stats["signalled"] for stats in found]
        return Totals(
            sums("assigned"),
            sums("met"),
            sums("ended"),
            sums("exchanged"),
            (sum(count for count, _ in signalled), max(last for _, last in signalled)),
            tuple(text for stats in found for text in stats["errors"]),
            sum(stats["cpu"] for stats in found),
            sum(stats["resident"] for stats in found),
        )

    def end_worker(self, number: int) -> None:
        """Kill one worker."""
        for process in self._alive():
            self._tell(process, EndWorker(number))

    def exchange(self) -> None:
        """Have the ranks exchange addresses."""
        for process in self._alive():
            self._tell(process, Exchange())

    def kill_one(self) -> None:
        """Kill a simulator, with all hosts and workers in it."""
        *_, last = self._alive()
        last.kill()
        last.wait()

    @override
    def summon(self, host: Host, order: bytes) -> None:
        alive = list(self._alive())
        process = alive[self._turn % len(alive)]
        self._turn += 1
        self._tell(process, StartHost(order.decode()))

    @override
    def command(self, host: Host) -> Sequence[str]:
        raise AssertionError("simulators start agents")

    @override
    def explain(self, host: Host, returncode: int, text: str) -> str:
        raise AssertionError("simulators start agents")

    def _alive(self) -> Iterator[subprocess.Popen[bytes]]:
        return (process for process in self._processes if process.poll() is None)

    def _tell(self, process: subprocess.Popen[bytes], request: Message) -> None:
        assert process.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError):
            process.stdin.write(encode(request) + b"\n")
            process.stdin.flush()

    def _ask(self, process: subprocess.Popen[bytes], request: Message) -> dict[str, Any]:
        assert process.stdout is not None
        self._tell(process, request)
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        return answer
