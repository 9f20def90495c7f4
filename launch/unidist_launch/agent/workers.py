"""The workers of one host of an elastic job: started and ended one by one, as the launcher says.

Where a launcher that has died may come back (`AgentOrder.orphan_sec`), they go on without it: the agent looks for it at
its address, keeps what it has not taken, and then tells which workers there are and how others have ended. A launcher
that is silent is another matter: the network may be cut, and others may have taken the place of these workers on its
side. Then they end, as always.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from typing_extensions import override

from unidist.control import SILENCE_PER_HEARTBEAT
from unidist.control.client import connect
from unidist.control.codec import Message, WireError
from unidist.control.connection import ConnectionClosed, ConnectionLost
from unidist.control.messages import (
    Goodbye,
    HostFacts,
    Refused,
    Signal,
    SignalWorkers,
    StartWorker,
    Taken,
    WorkerEnded,
    WorkerExit,
    WorkerStarted,
)
from unidist.errors import ConfigurationError
from unidist.jobs.liveness import StopWatch
from unidist.jobs.processes import HostShare, LocalProcesses, watch_exit
from unidist_launch.agent.backlog import Backlog
from unidist_launch.agent.ranks import AgentRanks, _Pipe
from unidist_launch.output.lines import Stream

_LAST_OUTPUT_SEC = 1.0
_RETRY_SEC = 0.25
_ATTEMPT_SEC = 2.0
_AFTER_OTHERS_SEC = 2.0
"""Members of a world are judged by those who wait for them, who say more; this agent ends who is stopped before."""


@dataclass(eq=False)
class HostWorker:
    """A worker that was started.

    Attributes:
        number: of the worker.
        seat: the label under which its output is shown.
        processes: holds its process, and ends what that has started.
        files: the descriptors of its output.
        stops: tells whether somebody has stopped it.
        is_killed: because somebody had stopped it for too long.
    """

    number: int
    seat: int
    processes: LocalProcesses
    files: dict[int, Stream]
    stops: StopWatch
    is_killed: bool = False

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process itself."""
        return self.processes.processes[0]


class AgentWorkers(AgentRanks):
    """Runs the host's workers. A context manager, as `AgentRanks`; arguments as there.

    Each worker is a job of its own for the operating system: when it ends, what it has started ends with it, and the
    other workers go on.
    """

    _workers: dict[int, HostWorker]
    _backlog: Backlog
    _orphan_since: float | None
    _retry_at: float

    @override
    def introduce(self) -> None:
        self._workers, self._backlog, self._orphan_since = {}, Backlog(), None
        super().introduce()

    def run(self) -> None:
        """Do what the launcher says until it has no more use for this agent.

        Raises:
            ConnectionLost: the launcher is gone for longer than it may be, or silent for too long.
            ConfigurationError: it has come back and does not want this agent; says why.
        """
        self._watch_termination()
        self._stack.callback(self._close_all)
        while not self._may_leave:
            if self._orphan_since is None:
                self._turn()
            else:
                self._end_side()  # nobody would know of them
                self._look()
                self._look_for_launcher(self._orphan_since)
            self._kill_stopped()
            self._collect_ends()
            self._collect_side()
        self._close_all()
        self._send(Goodbye())
        deadline = time.monotonic() + _LAST_OUTPUT_SEC
        while self._orphan_since is None and self._connection.pending_bytes and time.monotonic() < deadline:
            self._turn()

    # The launcher, and its absence

    def _facts(self) -> HostFacts:
        running = ((each.number, each.seat, each.process.pid) for each in self._workers.values())
        workers = self._backlog.workers(running)
        return replace(super()._facts(), workers=workers, terminating=self._backlog.is_terminating)

    def _turn(self) -> None:
        try:
            super()._turn()
        except ConnectionClosed as exc:
            self._lose_launcher(exc)

    def _receive(self) -> None:
        if self._orphan_since is None:  # it may have been lost earlier in this turn
            super()._receive()

    def _send(self, message: Message) -> None:
        self._backlog.note(message)
        if self._orphan_since is None:
            try:
                super()._send(message)
            except ConnectionClosed as exc:
                self._lose_launcher(exc)

    def _lose_launcher(self, error: ConnectionClosed) -> None:
        """Go on without the launcher, if it may come back; else raise `error`."""
        if not self._order.orphan_sec:
            raise error
        if self._orphan_since is None:
            self._orphan_since = self._retry_at = time.monotonic()
            self._selector.unregister(self._connection)
            self._connection.close()

    def _look_for_launcher(self, since: float) -> None:
        now = time.monotonic()
        if now - since > self._order.orphan_sec:
            raise ConnectionLost(f"the launcher has died, and has not come back in {self._order.orphan_sec:g} seconds")
        if now < self._retry_at:
            return
        self._retry_at = now + _RETRY_SEC
        try:
            address = (self._reached, self._order.port)
            found = connect(address, bytes.fromhex(self._order.secret), timeout=_ATTEMPT_SEC)
        except (ConnectionLost, WireError, TimeoutError):
            return
        self._connection, self._orphan_since = found, None
        self._heard = self._beat = time.monotonic()
        self._selector.register(found, selectors.EVENT_READ, self._receive)
        try:
            for message in (self._facts(), *self._backlog.messages()):
                found.send(message)
        except ConnectionClosed as exc:
            self._lose_launcher(exc)

    # The workers

    @override
    def _new_reports(self) -> list[tuple[int, dict[str, Any]]]:
        found = ((each.number, each.processes.new_reports()) for each in self._workers.values())
        return [(number, report) for number, reports in found for _, report in reports]

    def _obey(self, message: Message) -> None:
        match message:
            case StartWorker():
                self._start_worker(message)
            case Signal(number):
                self._signal_workers(number, self._workers)
            case SignalWorkers(number, workers):
                self._signal_workers(number, workers)
            case Taken():
                self._backlog.taken()
                super()._obey(message)
            case _:
                super()._obey(message)

    def _signal_workers(self, number: int, wanted: Iterable[int]) -> None:
        for each in wanted:
            if each in self._workers:
                self._workers[each].processes.signal(number)

    def _start_worker(self, message: StartWorker) -> None:
        number, seat = message.worker, message.seat
        order = self._order
        variables = {
            "UNIDIST_CONTROL_ADDRESS": self._server,
            "UNIDIST_HOST_ADDRESS": message.address,
            "UNIDIST_WORKER": str(number),
            **({"UNIDIST_JOB_VALUES": self._server} if message.values else {}),
        }
        # Workers of a host meet by what stands before the slash; each is swept by all of it.
        job_id = f"{order.job_id}.{order.host}/{number}"
        share = HostShare(
            job_id, bytes.fromhex(order.secret), (message.place,), variables, {"MASTER_ADDR": message.master}
        )
        env = {**self._thread_numbers(message.slots), **order.env}
        try:
            processes = LocalProcesses(1, env=env, die_with_thread=True, share=share)
        except (ConfigurationError, OSError) as exc:
            self._send(Refused(str(exc), number))
            return
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        try:
            process = processes.start(order.command, stdin=null, stdout=pipe, stderr=pipe)
        except ConfigurationError as exc:
            processes.close()
            self._send(Refused(str(exc), number))
            return
        worker = HostWorker(number, seat, processes, {}, StopWatch(process.pid))
        self._backlog.start(number, seat)
        self._workers[number] = worker
        for stream, file in ((Stream.STDOUT, process.stdout), (Stream.STDERR, process.stderr)):
            assert file is not None
            os.set_blocking(file.fileno(), False)
            worker.files[file.fileno()] = stream
            self._pipes.register(file.fileno(), selectors.EVENT_READ, _Pipe(seat, stream))
        exit_fd = watch_exit(process)
        if exit_fd is not None:
            self._selector.register(exit_fd, selectors.EVENT_READ, partial(self._forget_exit, exit_fd))
        self._send(WorkerStarted(number, process.pid))

    def _forget_exit(self, exit_fd: int) -> None:
        """It has done its work when it has woken the loop."""
        self._selector.unregister(exit_fd)
        os.close(exit_fd)

    @staticmethod
    def _thread_numbers(slots: int) -> dict[str, str]:
        """Return the numbers of threads of a rank, as `LocalProcesses` would give them to `slots` of them."""
        number = str(max(1, len(os.sched_getaffinity(0)) // max(1, slots)))
        return {name: number for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS") if name not in os.environ}

    def _kill_stopped(self) -> None:
        """Kill workers that somebody has stopped: one that was stopped before it came would hold its slot for ever."""
        limit = SILENCE_PER_HEARTBEAT * self._heartbeat_sec + _AFTER_OTHERS_SEC
        now = time.monotonic()
        for worker in self._workers.values():
            seconds = worker.stops.seconds(now)
            if seconds > limit and not worker.is_killed:
                worker.is_killed = True
                text = f"unidist: it has been stopped for {seconds:.1f} seconds: it is killed\n".encode()
                self._pass_on(_Pipe(worker.seat, Stream.STDERR), text)
                worker.processes.signal(signal.SIGKILL)

    def _collect_ends(self) -> None:
        for worker in [each for each in self._workers.values() if each.process.poll() is not None]:
            process = worker.process
            # First of all: the others wait to hear of it.
            self._send(WorkerEnded(worker.number))
            self._send_reports()  # its last one, before observers hear of its end
            worker.processes.close()  # what it left in the background, which would keep the pipes open
            self._read_to_end(worker)
            self._send(WorkerExit(worker.number, process.pid, process.returncode))
            del self._workers[worker.number]

    def _read_to_end(self, worker: HostWorker) -> None:
        deadline = time.monotonic() + _LAST_OUTPUT_SEC
        for fd, stream in worker.files.items():
            while fd in self._pipes.get_map() and time.monotonic() < deadline:
                if not self._read(fd, _Pipe(worker.seat, stream)):
                    break
            if fd in self._pipes.get_map():
                self._pipes.unregister(fd)
        for file in (worker.process.stdout, worker.process.stderr):
            assert file is not None
            file.close()

    def _close_all(self) -> None:
        for worker in self._workers.values():
            worker.processes.close()
            for file in (worker.process.stdout, worker.process.stderr):
                assert file is not None
                if not file.closed and file.fileno() in self._pipes.get_map():
                    self._pipes.unregister(file.fileno())
                file.close()
        self._workers.clear()


__all__ = ["AgentWorkers", "HostWorker"]
