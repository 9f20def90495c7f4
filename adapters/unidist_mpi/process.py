"""The MPI of this process: started once, used by every communicator, ended when the process ends.

Beside the communicators there is one channel for notices between all ranks: who gave up and why, who waits where, who
has left. MPI itself tells nobody anything of that. A rank that waits drives them; there is no thread.
"""

from __future__ import annotations

import atexit
import os
import struct
import sys
import threading
import time
from collections import deque
from enum import IntEnum
from typing import Any, Protocol

import mpi4py
from mpi4py import MPI

from unidist.errors import ConfigurationError
from unidist.runtime import context
from unidist.topology import Topology
from unidist.waits import has_raised

NAME_BYTES = 8
_HEADER = struct.Struct(f"!Bq{NAME_BYTES}s")  # kind, value, name of the communicator
_MAX_TEXT_BYTES = 3000  # with it a notice is sent at once, whatever the receiver does
_MAX_EARLY = 1000
_NAP_SEC = 1e-3
END_SEC = 30.0
"""How long a rank that saw an operation fail waits, when its script ends, for the other scripts to end."""


class NoticeKind(IntEnum):
    """The kinds of notices, and the meaning of their values."""

    ABORT = 1
    """The rank of the group that caused it; -1 if it is not known."""
    ARRIVED = 2
    """The collective in which the sender waits."""
    LEFT = 3
    """The number of collectives that the sender has begun."""


class DrivenGroup(Protocol):
    """A communicator, as the process sees it: it moves it on, and hands notices to it."""

    @property
    def is_broken(self) -> bool:
        """Return whether it was aborted."""

    def advance(self) -> None:
        """Move on what can be moved without waiting."""

    def notice(self, member: int, kind: NoticeKind, value: int, text: str) -> None:
        """Take a notice of a rank of the world."""


class MpiProcess:
    """The running MPI. Made by `start`; thread-safe.

    Attributes:
        pid: of the process; a child that it forks has no MPI.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.RLock()
        self._notices: MPI.Intracomm | None = None
        self._groups: dict[bytes, DrivenGroup] = {}
        self._busy: dict[bytes, DrivenGroup] = {}
        self._early: deque[tuple[bytes, int, NoticeKind, int, str]] = deque(maxlen=_MAX_EARLY)
        self._outgoing: list[tuple[MPI.Request, bytes]] = []
        self._abandoned: list[Any] = []

    def duplicate_world(self) -> MPI.Intracomm:
        """Return a new MPI communicator over all processes. Collective, without a time limit."""
        if self._notices is None:
            self._notices = MPI.COMM_WORLD.Dup()
            self._notices.Set_errhandler(MPI.ERRORS_RETURN)
        comm = MPI.COMM_WORLD.Dup()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        return comm

    # Groups

    def add(self, name: bytes, group: DrivenGroup) -> None:
        """Give the notices for `name` to `group`, those that came before included."""
        with self._lock:
            self._groups[name] = group
            for _, *notice in [item for item in self._early if item[0] == name]:
                group.notice(*notice)  # type: ignore[arg-type]  # the tuple without its name
            self._early = deque((item for item in self._early if item[0] != name), _MAX_EARLY)

    def remove(self, name: bytes) -> None:
        """Forget a group."""
        with self._lock:
            self._groups.pop(name, None)
            self._busy.pop(name, None)

    def mark_busy(self, name: bytes, busy: bool) -> None:
        """Note whether a group has something to move on."""
        with self._lock:
            if busy and name in self._groups:
                self._busy[name] = self._groups[name]
            else:
                self._busy.pop(name, None)

    def abandon(self, *kept: object) -> None:
        """Keep for ever what MPI may still use: a collective that began and never ended cannot be taken back."""
        with self._lock:
            self._abandoned.append(kept)

    # Notices

    def notify(self, members: tuple[int, ...], name: bytes, kind: NoticeKind, value: int = 0, text: str = "") -> None:
        """Send a notice to ranks of the world except this one. From any thread; does not wait."""
        if self._notices is None or not self.can_communicate:
            return
        message = _HEADER.pack(kind, value, name) + text.encode()[:_MAX_TEXT_BYTES]
        with self._lock:
            for member in members:
                if member != MPI.COMM_WORLD.rank:
                    self._outgoing.append((self._notices.Isend((message, MPI.BYTE), member), message))
            self._forget_sent()

    def drive(self) -> None:
        """Take the notices that came, and move on every group that has something to move."""
        if self._lock.acquire(blocking=False):
            try:
                self._take_notices()
                busy = list(self._busy.values())
            finally:
                self._lock.release()
            for group in busy:
                group.advance()

    @property
    def can_communicate(self) -> bool:
        """False in a forked child, and once MPI has ended."""
        return os.getpid() == self.pid and not MPI.Is_finalized()

    def _take_notices(self) -> None:
        assert self._notices is not None
        status = MPI.Status()
        while (message := self._notices.Improbe(status=status)) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            message.Recv((data, MPI.BYTE))  # it is here already
            kind, value, name = _HEADER.unpack_from(data)
            text = data[_HEADER.size :].decode(errors="replace")
            group = self._groups.get(name)
            if group is not None:
                group.notice(status.Get_source(), NoticeKind(kind), value, text)
            else:  # of a group that this rank has closed, or has yet to make
                self._early.append((name, status.Get_source(), NoticeKind(kind), value, text))
        if self._outgoing:
            self._forget_sent()

    def _forget_sent(self) -> None:
        self._outgoing = [item for item in self._outgoing if not item[0].Test()]

    def end(self) -> None:
        """Give everything back at the end of the script, end MPI, and let a script that failed end the job.

        MPI waits at its end for all ranks, without a limit; those that wait for this one in an operation, or hang,
        would never come there.
        """
        if not self.can_communicate:
            return
        context.shutdown()
        if has_raised() or not self._all_come():
            sys.stdout.flush()
            sys.stderr.flush()
            MPI.COMM_WORLD.Abort(1)
        by_itself = mpi4py.rc.initialize if mpi4py.rc.finalize is None else mpi4py.rc.finalize
        if not by_itself:  # else mpi4py does it, later
            MPI.Finalize()

    def _all_come(self) -> bool:
        """Wait for all ranks to end; after a failed operation, not for long. Returns whether they did."""
        if self._notices is None:  # it never connected
            return True
        is_broken = bool(self._abandoned) or any(group.is_broken for group in self._groups.values())
        deadline = time.monotonic() + (END_SEC if is_broken else float("inf"))
        request = self._notices.Ibarrier()
        while not request.Test():
            if time.monotonic() > deadline:
                print(
                    f"unidist: rank {MPI.COMM_WORLD.rank} has ended after a failed operation, and other ranks have not "
                    f"within {END_SEC:g} s: ending the job",
                    file=sys.stderr,
                )
                return False
            with self._lock:
                self._take_notices()
            time.sleep(_NAP_SEC)
        return True


_lock = threading.Lock()
_process: MpiProcess | None = None


def start(topology: Topology) -> MpiProcess:
    """Return the MPI of this process; starts it if the script has not done so.

    Raises:
        ConfigurationError: MPI was ended already, was started for one thread only, or connects other processes.
    """
    global _process
    with _lock:
        if MPI.Is_finalized():
            raise ConfigurationError(
                f"rank {topology.rank}: MPI was ended in this process (MPI.Finalize), and it starts only once. "
                "Leave it out: mpi4py ends MPI when the process does."
            )
        if not MPI.Is_initialized():  # the script told mpi4py not to
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ConfigurationError(
                f"rank {topology.rank}: MPI was started with thread level {MPI.Query_thread()}, but unidist needs "
                f"MPI.THREAD_MULTIPLE ({MPI.THREAD_MULTIPLE}). Set mpi4py.rc.threads and rc.thread_level back to their "
                "defaults, or use an MPI that was built for threads."
            )
        found = (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
        if found != (topology.rank, topology.world_size):
            raise ConfigurationError(
                f"MPI says that this is rank {found[0]} of {found[1]}, but the job says rank {topology.rank} of "
                f"{topology.world_size}. Start it by `mpirun -n {topology.world_size} python train.py`, with the "
                "mpirun of the MPI that mpi4py uses, and without another launcher."
            )
        if _process is None:
            _process = MpiProcess()
            atexit.register(_process.end)
        return _process
