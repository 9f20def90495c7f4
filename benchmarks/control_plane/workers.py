"""Simulated workers: threads that speak with the control plane as a rank's process does, and train nothing."""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from unidist.control.connection import Connection
from unidist.control.elastic import NO_STATE, Assignment, WorkerLink
from unidist.control.rendezvous import ControlRendezvous
from unidist.errors import PeerLostError, UnidistError
from unidist.rendezvous import MeetingPlace
from unidist.topology import Topology

LONG = timedelta(seconds=300)
_ADDRESS_BYTES = 40
"""About what an engine that connects hosts tells of a rank: a version, a port, an IP address."""


@dataclass
class Times:
    """How many workers have come to a point, and when the last did (`time.monotonic`, the same in all processes)."""

    count: int = 0
    last: float = 0.0

    def note(self) -> None:
        """One more."""
        self.count += 1
        self.last = time.monotonic()


@dataclass
class Record:
    """What happened to the workers of this process. By generation: got a place there, met all others, saw its end."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    assigned: dict[int, Times] = field(default_factory=lambda: defaultdict(Times))
    met: dict[int, Times] = field(default_factory=lambda: defaultdict(Times))
    ended: dict[int, Times] = field(default_factory=lambda: defaultdict(Times))
    exchanged: dict[int, Times] = field(default_factory=lambda: defaultdict(Times))
    signalled: Times = field(default_factory=Times)
    errors: list[str] = field(default_factory=list)

    def as_fields(self) -> dict[str, Any]:
        """Return plain data."""
        with self.lock:
            by_generation = {
                name: {generation: [times.count, times.last] for generation, times in getattr(self, name).items()}
                for name in ("assigned", "met", "ended", "exchanged")
            }
            signalled = [self.signalled.count, self.signalled.last]
            return {**by_generation, "signalled": signalled, "errors": self.errors[:5]}

    def note(self, times: dict[int, Times], generation: int) -> None:
        """One more worker has come to a point of a generation."""
        with self.lock:
            times[generation].note()


class SimulatedProcess:
    """Stands for the process of a worker, for the code of its agent: as `subprocess.Popen` and `LocalProcesses`.

    Args:
        ended: called when it has ended.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self.pid = os.getpid()
        self.returncode: int | None = None
        self.stdout, self.stderr = io.BytesIO(), io.BytesIO()
        self._ended = ended

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self.returncode

    def signal(self, number: int, chosen: list[int] | None = None) -> None:
        """Get a signal."""
        if number in (signal.SIGTERM, signal.SIGKILL):
            self.end(-number)

    def end(self, returncode: int) -> None:
        """End, with this exit code."""
        if self.returncode is None:
            self.returncode = returncode
            self._ended()

    def new_reports(self) -> list[Any]:
        """Report nothing."""
        return []

    def close(self) -> None:
        """Leave nothing."""


class SimulatedWorker(SimulatedProcess):
    """A worker of an elastic job. It goes from one generation to the next as `unidist.init` and `elastic.run` do.

    Args:
        number: of the worker.
        server: address of the coordinator.
        secret: the job's.
        record: of this process.
        ended: called when it has ended.
    """

    def __init__(
        self,
        number: int,
        server: tuple[str, int],
        secret: bytes,
        record: Record,
        ended: Callable[[], None],
    ) -> None:
        super().__init__(ended)
        self.number = number
        self._server, self._secret, self._record = server, secret, record
        self._wake = threading.Event()
        self._link: WorkerLink | None = None
        self._meeting: ControlRendezvous | None = None
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def processes(self) -> list[SimulatedWorker]:
        """The only process of this worker."""
        return [self]

    def end(self, returncode: int) -> None:
        """End without a word, as by `kill -9`: the kernel closes its connections."""
        if self.returncode is None:
            super().end(returncode)
            if self._link is not None:
                cut(self._link._connection)
            if self._meeting is not None:
                cut(self._meeting._client._connection)
            self._wake.set()

    def _run(self) -> None:
        try:
            self._link = link = WorkerLink(
                self._server,
                self._secret,
                self.number,
                timeout=LONG,
                on_ended=self._note_end,
                on_change=lambda generation: self._wake.set(),
            )
            progress, reason = NO_STATE, ""
            while self.returncode is None:
                self._wake.clear()
                place = link.next_world(progress, reason=reason, timeout=LONG)
                self._record.note(self._record.assigned, place.generation)
                progress = place.progress + 1
                try:
                    self._meet(place)
                    self._wake.wait()
                except PeerLostError as exc:
                    reason = link.ended or str(exc)
                else:
                    reason = link.ended
                finally:
                    if self._meeting is not None:
                        self._meeting.close()
        except UnidistError as exc:
            if self.returncode is None:
                self._record.errors.append(f"worker {self.number}: {exc}")
                self.end(1)

    def _meet(self, place: Assignment) -> None:
        where = MeetingPlace(self._server, "127.0.0.1", place.generation)
        self._meeting = meet(where, place.topology, self._secret)
        self._record.note(self._record.met, place.generation)

    def _note_end(self, text: str) -> None:
        if self.returncode is None:
            generation = -1 if self._link is None else self._link.generation  # None: lost while it introduces itself
            self._record.note(self._record.ended, generation)
        self._wake.set()


class SimulatedRank(SimulatedProcess):
    """A rank of a job of fixed size.

    Args:
        topology: its place.
        server: address of the coordinator.
        secret: the job's.
        record: of this process.
        ended: called when it has ended.
    """

    def __init__(
        self,
        topology: Topology,
        server: tuple[str, int],
        secret: bytes,
        record: Record,
        ended: Callable[[], None],
    ) -> None:
        super().__init__(ended)
        self._topology, self._server, self._secret, self._record = topology, server, secret, record
        self._is_asked = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def signal(self, number: int, chosen: list[int] | None = None) -> None:
        """Get a signal."""
        with self._record.lock:
            self._record.signalled.note()
        super().signal(number)

    def exchange(self) -> None:
        """Exchange addresses with all others, once."""
        self._is_asked.set()

    def _run(self) -> None:
        try:
            self._meeting = meet(MeetingPlace(self._server, "127.0.0.1"), self._topology, self._secret)
            self._record.note(self._record.met, 0)
            self._is_asked.wait()
            exchange_addresses(self._meeting, self._topology)
            self._record.note(self._record.exchanged, 0)
        except UnidistError as exc:
            self._record.errors.append(f"rank {self._topology.rank}: {exc}")
            self.end(1)


def meet(place: MeetingPlace, topology: Topology, secret: bytes) -> ControlRendezvous:
    """Go through the rounds in which the ranks of a job on several hosts connect, as with the engine gloo.

    Returns:
        The rendezvous, which a rank keeps open while it trains.
    """
    meeting = ControlRendezvous(place, topology, epoch=0, secret=secret, timeout=LONG)
    first = topology.rank == 0
    # Where rank 0 listens for the monitors of the others, and where it serves the store of the engine.
    told = b'["127.0.0.1", 40000, "0123456789abcdef0123456789abcdef"]' if first else b""
    assert meeting.allgather(told, timeout=LONG)[0].payload
    names = meeting.allgather(b"gloo", timeout=LONG)  # has to be the same everywhere
    assert len(names) == topology.world_size
    meeting.allgather(told, timeout=LONG)
    return meeting


def exchange_addresses(meeting: ControlRendezvous, topology: Topology) -> None:
    """Tell all ranks this one's address, and hear those of all: what the engine tcp does, of at most 1024 ranks."""
    address = f"{topology.rank}:127.0.0.1".encode().ljust(_ADDRESS_BYTES, b"\0")
    addresses = meeting.allgather(address, timeout=LONG)
    assert addresses[topology.rank].payload == address


def cut(connection: Connection) -> None:
    """End a connection as the kernel does when its process is killed."""
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as sock:
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has ended already
        return
