"""Simulated hosts: real agents, whose workers are threads of this process."""

from __future__ import annotations

import os
import selectors
import signal
from typing import Any

from benchmarks.control_plane.workers import Record, SimulatedRank, SimulatedWorker
from unidist.control.connection import Connection
from unidist.control.messages import Start, Started, StartWorker, WorkerStarted
from unidist.jobs.liveness import StopWatch
from unidist_launch.agent.order import AgentOrder
from unidist_launch.agent.ranks import AgentRanks
from unidist_launch.agent.workers import AgentWorkers, HostWorker

ADDRESS = "127.0.0.1"
_TURN_SEC = 0.25
"""Many agents share a processor here, so each looks seldomer for what no event tells."""


class _Woken:
    """Wakes the loop of an agent when a worker of its host has ended, as the descriptor of its process would."""

    def __init__(self, agent: AgentRanks) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        agent._stack.callback(self._close)
        agent._selector.register(self._descriptor, selectors.EVENT_READ, lambda: os.eventfd_read(self._descriptor))

    def wake(self) -> None:
        """Wake it. From any thread."""
        if self._descriptor >= 0:
            os.eventfd_write(self._descriptor, 1)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)


class SimulatedHost(AgentWorkers):
    """The agent of a host of an elastic job. Arguments as for `AgentRanks`, and the record of this process."""

    turn_sec = _TURN_SEC

    def __init__(self, order: AgentOrder, connection: Connection, record: Record) -> None:
        super().__init__(order, connection, server=ADDRESS, address=ADDRESS)
        self._record = record
        self._woken = _Woken(self)

    def end_worker(self, number: int) -> bool:
        """Kill a worker, if it is here. From any thread."""
        worker = self._workers.get(number)
        if worker is not None:
            worker.processes.signal(signal.SIGKILL)
        return worker is not None

    def _watch_termination(self) -> None:
        """Signals are not for a thread."""

    def _start_worker(self, message: StartWorker) -> None:
        number, seat = message.worker, message.seat
        server, secret = (ADDRESS, self._order.port), bytes.fromhex(self._order.secret)
        worker = SimulatedWorker(number, server, secret, self._record, self._woken.wake)
        stand_in: Any = worker
        self._backlog.start(number, seat)
        self._workers[number] = HostWorker(number, seat, stand_in, {}, StopWatch(worker.pid))
        self._send(WorkerStarted(number, worker.pid))


class _Processes:
    """The ranks of a host, as `LocalProcesses`."""

    def __init__(self, ranks: list[SimulatedRank]) -> None:
        self.processes = ranks

    def signal(self, number: int, chosen: list[int] | None = None) -> None:
        """Send a signal to all of them, or to some."""
        for index, rank in enumerate(self.processes):
            if chosen is None or index in chosen:
                rank.signal(number)

    def new_reports(self) -> list[Any]:
        """Report nothing."""
        return []

    def close(self) -> None:
        """Leave nothing."""


class SimulatedRanks(AgentRanks):
    """The agent of a host of a job of fixed size. Arguments as for `SimulatedHost`."""

    turn_sec = _TURN_SEC

    def __init__(self, order: AgentOrder, connection: Connection, record: Record) -> None:
        super().__init__(order, connection, server=ADDRESS, address=ADDRESS)
        self._record = record
        self._ranks: list[SimulatedRank] = []
        self._woken = _Woken(self)

    def end_worker(self, number: int) -> bool:
        """Kill a rank, if it is here. From any thread."""
        for place, rank in zip(self._places, self._ranks, strict=True):
            if place.rank == number:
                rank.end(-9)
                return True
        return False

    def exchange(self) -> None:
        """Have all ranks exchange their addresses. From any thread."""
        for rank in self._ranks:
            rank.exchange()

    def _watch_termination(self) -> None:
        """Signals are not for a thread."""

    def _start(self, message: Start) -> None:
        self._places = message.places
        server, secret = (ADDRESS, self._order.port), bytes.fromhex(self._order.secret)
        self._ranks = [SimulatedRank(place, server, secret, self._record, self._woken.wake) for place in self._places]
        stand_in: Any = _Processes(self._ranks)
        self._processes = stand_in
        self._send(Started(tuple(rank.pid for rank in self._ranks)))
