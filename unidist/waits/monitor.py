"""Each rank's monitor: a thread that reports the call in which this rank is blocked, and ends it in a deadlock."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import select
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from unidist.communicator import Communicator, format_ranks
from unidist.control import Connection, ConnectionLost, ControlServer, Message, WireError, connect
from unidist.errors import DeadlockError, PeerLostError, StalledError
from unidist.rendezvous import Rendezvous
from unidist.waits.board import Board, blocked_calls, has_entered, state_of_left
from unidist.waits.calls import Call, Group, Stack, stacks
from unidist.waits.detection import UNEVEN_BATCHES, Activity, RankState, find_deadlock
from unidist.waits.script_line import has_raised, innermost, library_line, script_line

__all__ = ["Monitor", "waits_natively"]

_log = logging.getLogger("unidist")

_LOOK_SEC = 0.5
_SLOWEST_BYTES_PER_SEC = 50e6
"""Named operations and messages of so many bytes may be under way without being blocked."""
_GRACE_SEC = 0.3
"""From the report of a deadlock until communicators are aborted: the other ranks get it, too."""
_IDLE = 0.5
"""Of one core: a process that uses less computes nothing."""

_native_waits: set[str] = set()


def waits_natively(file: str) -> None:
    """Declare that a thread inside a function of this file may wait in C++ for operations that run on other threads.

    For frameworks that run operations of a graph on threads of their own. While the thread that called `init()` is
    there, the process uses no CPU time, and another thread is blocked in an operation, the rank counts as blocked.

    Args:
        file: end of the file's path: "tensorflow/python/eager/execute.py".
    """
    _native_waits.add(file)


class Monitor:
    """Keeps record of the groups of a runtime, and watches what this rank is blocked in.

    Args:
        rank: of this process.
        world_size: number of ranks.
        patience: a call is blocked after this; zero: nothing is watched.
        report_every: after this a line says who is waited for, and again each time it has passed; zero: never.
        abort: ends all operations of this rank's communicators with PeerLostError.
        leaves_for_good: a rank that closes its runtime enters nothing more; False: in an elastic job, where another
            generation may follow.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        patience: timedelta,
        report_every: timedelta,
        abort: Callable[[str], None],
        leaves_for_good: bool = True,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._patience_sec = patience.total_seconds()
        self._report_every_sec = report_every.total_seconds()
        self._abort = abort
        self._leaves_for_good = leaves_for_good
        self._thread_of_script = threading.get_ident()
        self._groups: dict[str, Group] = {}
        self._communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self._since: dict[Call, float] = {}
        self._keys: dict[int, Call] = {}  # reported calls by key
        self._next_key = 0
        self._text = ""
        self._found = threading.Event()
        self._reported: list[dict[str, Any]] = []
        self._left: dict[int, Mapping[str, Any]] = {}  # ranks that ended and took the board with them
        self._has_failed = False  # an operation ended with a lost peer: what this rank waits in says nothing any more
        self._ended: set[int] = set()  # the answer to the question which of the lost ranks have ended
        self._answered = threading.Event()
        self._idle_since: float | None = None
        self._cpu = (0.0, 0.0)
        self._closing = ExitStack()
        self._lock = threading.Lock()  # of the connection
        self._connection: Connection | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    # For watched objects

    def add(self, group: Group, communicator: Communicator) -> None:
        """Keep record of one more group, and remember its communicator without keeping it alive."""
        self._groups[group.name] = group
        self._communicators.add(communicator)

    @property
    def communicators(self) -> list[Communicator]:
        """All watched communicators, including those split off by strategies."""
        return list(self._communicators)

    def instead_of(self, error: PeerLostError, call: Call) -> BaseException:
        """Return the DeadlockError that ended an operation with `error`, one that says more than it, or `error`."""
        self._has_failed = True
        if self._reported and not self._closed:
            self._found.wait(2 * _GRACE_SEC)  # a peer may have had the report, and aborted, before this rank got it
        if self._text:
            return DeadlockError(self._text)
        if UNEVEN_BATCHES in str(error):  # of the operation that this one consists of
            return error
        members = call.group.members
        lost = [members[rank] for rank in error.ranks if rank < len(members)] or members
        if isinstance(error, StalledError) or not self._leaves_for_good or not (ended := self._which_have_ended(lost)):
            return error
        line = script_line(threading.get_ident())
        where = f" at {line}" if line else ""
        return PeerLostError(
            f"{_ended(ended)} while rank {self._rank} waits in {_text(_context(call))}{where}. "
            f"{UNEVEN_BATCHES} [{error}]",
            ranks=error.ranks,
        )

    def _which_have_ended(self, lost: Sequence[int]) -> list[int]:
        """Return the ones of lost ranks whose scripts have ended, as the board knows."""
        ranks = set(lost) - {self._rank}
        if (connection := self._connection) is not None and not self._left.keys() >= ranks:
            self._answered.clear()
            self._send(connection, {"type": "lost?", "rank": self._rank, "ranks": list(ranks)})
            self._answered.wait(_GRACE_SEC)
        return sorted(ranks & (self._ended | self._left.keys()))

    @property
    def reports(self) -> bool:
        """Whether it says who is waited for."""
        return self._world_size > 1 and bool(self._patience_sec and self._report_every_sec)

    # From start to close

    def start(self, rendezvous: Rendezvous, secret: bytes, *, timeout: timedelta) -> None:
        """Connect the monitors of all ranks. Collective over all ranks.

        Args:
            rendezvous: of the job.
            secret: of the job, or empty.
            timeout: longest wait for the other ranks.
        """
        if self._world_size == 1 or not self._patience_sec:
            return
        token, port = secrets.token_bytes(16), 0
        key = hashlib.sha256(b"monitor" + secret + token).digest()
        if self._rank == 0:
            board = Board(self._report_every_sec, lambda line: _log.warning("%s", line))
            try:
                server = ControlServer(board, key, host=rendezvous.address)
                server.start()
                self._closing.callback(server.close)
                port = server.port
            except (OSError, RuntimeError) as exc:  # RuntimeError: no memory for one more thread
                _log.warning("deadlocks will not be noticed: rank 0 cannot listen at %s: %s", rendezvous.address, exc)
        payload = json.dumps([rendezvous.address, port, token.hex()]).encode() if self._rank == 0 else b""
        host, port, text = json.loads(rendezvous.allgather(payload, timeout=timeout)[0].payload)
        if not port:
            return
        key = hashlib.sha256(b"monitor" + secret + bytes.fromhex(text)).digest()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        thread = threading.Thread(target=self._run, args=((host, port), key), name="unidist-monitor", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # no memory for one more thread; the others take this rank to be able to go on
            _log.warning("deadlocks of rank %d will not be noticed: %s", self._rank, exc)
            os.close(self._wake_read)
            os.close(self._wake_write)
            return
        self._thread = thread

    def leave(self) -> None:
        """Tell the other ranks that this one enters nothing more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            is_done = self._leaves_for_good and not self._has_failed and not has_raised()
            kind = "left" if is_done else "failed"
            message = {"type": kind, "rank": self._rank, "groups": self._counts()}
            with contextlib.suppress(ConnectionLost, OSError):
                if self._connection is not None:
                    self._connection.send(message)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self.leave()
        thread, self._thread = self._thread, None
        if thread is not None:
            os.write(self._wake_write, b"\0")
            if thread is not threading.current_thread():
                thread.join(timeout=10)
            os.close(self._wake_read)
            os.close(self._wake_write)
        self._closing.close()

    # The thread

    def _run(self, address: tuple[str, int], key: bytes) -> None:
        try:
            connection = connect(address, key, timeout=30)
        except (ConnectionLost, WireError, TimeoutError, OSError) as exc:
            _log.debug("rank %d is without a monitor: %s", self._rank, exc)
            return
        try:
            with self._lock:
                self._connection = connection
                connection.send({"type": "running", "rank": self._rank})
            self._watch(connection)
        except Exception:  # of the other end, or our own: training goes on without it
            _log.debug("the monitor of rank %d ended", self._rank, exc_info=True)
        finally:
            with self._lock:
                self._connection = None
            connection.close()

    def _watch(self, connection: Connection) -> None:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        poller.register(connection, select.POLLIN)
        while not self._closed:
            ready = dict(poller.poll(1000 * _LOOK_SEC))
            if self._wake_read in ready:
                return
            if ready:
                try:
                    with self._lock:
                        messages = connection.receive()
                except ConnectionLost:
                    poller.unregister(connection)
                    messages = ()
                    with self._lock:
                        self._connection = None
                    self._answered.set()
                for message in messages:
                    self._received(connection, message)
            self._look(connection, time.monotonic())

    def _received(self, connection: Connection, message: Message) -> None:
        if message["type"] == "ask":
            self._answer(connection, message)
        elif message["type"] == "left":
            self._left[int(message["rank"])] = message["groups"]
            self._answered.set()
        elif message["type"] == "ended":
            self._ended.update(message["ranks"])
            self._answered.set()
        elif message["type"] == "deadlock":
            self._end(message["text"])

    def _answer(self, connection: Connection, question: Message) -> None:
        if self._has_failed:
            self._send(connection, {"type": "failed", "rank": self._rank})
            return
        now = time.monotonic()
        keys = {call: key for key, call in self._keys.items()}
        blocked = [keys[call] for call in self._blocked(now) if call in keys]
        entered = [
            (call["rank"], call["key"])
            for call in question["calls"]
            if self._may_enter(self._groups.get(call["group"]), now)
            or has_entered(self._groups.get(call["group"]), call)
        ]
        answer = {
            "type": "answer",
            "rank": self._rank,
            "question": question["question"],
            "blocked": blocked,
            "entered": entered,
            "where": script_line(self._thread_of_script),
            "inside": "" if blocked else library_line(self._thread_of_script),
        }
        self._send(connection, answer)

    def _may_enter(self, group: Group | None, now: float) -> bool:
        """Return whether a thread of the script's other than the one that called `init()` may enter calls of a group.

        One that used the group last, and is not blocked.
        """
        if group is None or group.is_pending is not None or group.thread in (0, self._thread_of_script):
            return False
        thread = next((each for each in threading.enumerate() if each.ident == group.thread), None)
        if thread is None or thread.name.startswith("unidist-"):
            return False
        return self._stuck(group.thread, now) is None

    def _look(self, connection: Connection, now: float) -> None:
        """Report the calls in which this rank is blocked, if they have changed."""
        present = {each for calls in list(stacks.values()) for each in list(calls) if isinstance(each, Call)}
        self._since = {call: self._since.get(call, now) for call in present}
        self._measure_cpu(now)
        blocked = self._blocked(now)
        known = {call: key for key, call in self._keys.items()}
        if [known.get(call) for call in blocked] == [call["key"] for call in self._reported]:
            if blocked and self._left and not self._has_failed:
                self._judge_alone()
            return
        self._keys = {}
        for call in blocked:
            self._next_key += 1
            self._keys[self._next_key] = call
        self._reported = [self._described(key, call, now) for key, call in self._keys.items()]
        if not self._reported:
            self._send(connection, {"type": "running", "rank": self._rank})
        else:
            self._send(connection, {"type": "blocked", "rank": self._rank, "calls": self._reported})

    def _send(self, connection: Connection, message: Message) -> None:
        with self._lock, contextlib.suppress(ConnectionLost):
            if not self._closed:
                connection.send(message)

    def _judge_alone(self) -> None:
        """See whether this rank waits for one that has left, when there is no board any more."""
        states = {rank: state_of_left(rank, groups, self._reported) for rank, groups in self._left.items()}
        own = RankState(Activity.BLOCKED, blocked_calls(self._reported), script_line(self._thread_of_script))
        deadlock = find_deadlock({**states, self._rank: own})
        if deadlock is not None:
            self._end(deadlock.text)

    def _end(self, text: str) -> None:
        if not self._text:
            self._text = text
            self._found.set()
            time.sleep(_GRACE_SEC)
            self._abort("the ranks are in a deadlock")

    # What is blocked

    def _blocked(self, now: float) -> list[Call]:
        """Return the calls in which this rank is blocked: it goes on when one of them does. None: it computes."""
        own = self._stuck(self._thread_of_script, now)
        if own is not None:
            return [own]
        if not _native_waits or self._idle_since is None or now - self._idle_since < self._patience_sec:
            return []
        if not innermost(self._thread_of_script).endswith(tuple(_native_waits)):
            return []
        return [call for thread in list(stacks) if (call := self._stuck(thread, now)) is not None]

    def _stuck(self, thread: int, now: float) -> Call | None:
        """Return the innermost call that a thread has been in for longer than is ordinary."""
        for call in reversed([each for each in stacks.get(thread, ()) if isinstance(each, Call)]):
            if now - self._since.get(call, now) >= self._patience(call):
                return call
        return None

    def _patience(self, call: Call) -> float:
        ordinary = call.nbytes / _SLOWEST_BYTES_PER_SEC if call.kind != "collective" else 0.0
        return self._patience_sec + ordinary

    def _measure_cpu(self, now: float) -> None:
        """Note since when this process has used next to no CPU time."""
        before, used_before = self._cpu
        used = time.process_time()
        self._cpu = (now, used)
        if used - used_before > _IDLE * (now - before):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now

    def _described(self, key: int, call: Call, now: float) -> dict[str, Any]:
        """Return a call as the board gets it."""
        group = call.group
        own = group.members.index(self._rank)
        others = group.members if call.peer < 0 else (group.members[call.peer],)
        context = _context(call)
        labels = [each for each in context if isinstance(each, str)]
        return {
            "rank": self._rank,
            "key": key,
            "group": group.name,
            "kind": call.kind,
            "number": call.number,
            "name": call.name,
            "peer": own,
            "awaited": [rank for rank in others if rank != self._rank],
            "text": _text(context),
            "asked": labels[0] if labels else "",
            "age": now - self._since[call],
        }

    def _counts(self) -> dict[str, Any]:
        return {name: group.counts() for name, group in list(self._groups.items())}


def _ended(ranks: Sequence[int]) -> str:
    who, has = (f"rank {ranks[0]}", "has") if len(ranks) == 1 else (f"ranks {format_ranks(ranks)}", "have")
    return f"{who} {has} ended (the script is done, or it called shutdown())"


def _context(call: Call) -> Stack:
    """Return the labels and calls within which a thread is in a call, that one last."""
    for calls in list(stacks.values()):
        found: Stack = list(calls)
        for index, each in enumerate(found):
            if each is call:
                return found[: index + 1]
    return [call]


def _text(context: Stack) -> str:
    """Return a call in words: in those of the script, if it is known which call of the script that is."""
    labels = [each for each in context if isinstance(each, str)]
    outer = next(each for each in context if isinstance(each, Call))
    if outer.name:
        operation = f"{outer.operation} {outer.name!r}"
    elif outer.peer >= 0:
        direction = "to" if outer.kind == "send" else "from"
        operation = f"{outer.operation} {direction} rank {outer.group.members[outer.peer]} on {outer.group.description}"
    else:
        operation = f"{outer.operation} on {outer.group.description}"
    return f"{' > '.join(labels)} ({operation})" if labels else operation
