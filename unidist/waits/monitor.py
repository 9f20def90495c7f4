"""Each rank's monitor: a thread that reports the call in which this rank is blocked, and ends it in a deadlock."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import select
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta

from unidist.communicator import Communicator, format_ranks
from unidist.control import Connection, ConnectionLost, ControlServer, Message, WireError, connect, unexpected
from unidist.errors import DeadlockError, PeerLostError, StalledError
from unidist.observation import Call, GroupCalls, GroupCounts, Stack, stacks
from unidist.rendezvous import Rendezvous
from unidist.waits.board import Board, blocked_calls, ending_of_left, has_entered, state_of_left
from unidist.waits.detection import Activity, RankState, find_deadlock
from unidist.waits.messages import (
    Answer,
    Ask,
    Blocked,
    Deadlock,
    HaveEnded,
    RankFailed,
    RankLeft,
    ReportedCall,
    Running,
    WhoHasEnded,
)
from unidist.waits.native_wait import waits_natively
from unidist.waits.script_line import library_line, raised, script_line

__all__ = ["Monitor"]

_log = logging.getLogger("unidist")

_LOOK_SEC = 0.5
_SLOWEST_BYTES_PER_SEC = 50e6
"""Named operations and messages of so many bytes may be under way without being blocked."""
_GRACE_SEC = 0.3
"""From the report of a deadlock until communicators are aborted: the other ranks get it, too."""
_MOST_CHARS = 300
"""Of the exception with which a script has ended, in errors of other ranks."""
_STUCK = 5
"""So many times as long as in a call of ours a rank may wait in a library, after another one is gone."""
_IDLE = 0.5
"""Of one core: a process that uses less computes nothing."""


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

    Attributes:
        num_updates: of optimizers, which this rank has made.
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
        self._groups: dict[str, GroupCalls] = {}
        self._communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self._since: dict[Call, float] = {}
        self._keys: dict[int, Call] = {}  # reported calls by key
        self._next_key = 0
        self._text = ""
        self._found = threading.Event()
        self._reported: list[ReportedCall] = []
        self._left: dict[int, RankLeft] = {}  # ranks that ended and took the board with them
        self._has_failed = False  # an operation ended with a lost peer: what this rank waits in says nothing any more
        self._told = ""  # to the script, of ranks that have ended
        self._endings: dict[int, str] = {}  # the answer to the question which of the lost ranks have ended
        self._answered = threading.Event()
        self._lost: dict[int, float] = {}  # ranks that are gone, or whose scripts have failed, and since when
        self._when_stuck: Callable[[str], None] | None = None
        self._idle_since: float | None = None
        self._cpu = (0.0, 0.0)
        self._closing = ExitStack()
        self._lock = threading.Lock()  # of the connection
        self._connection: Connection | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self.num_updates = 0

    # For observed communicators

    def add(self, group: GroupCalls, communicator: Communicator) -> None:
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
        if self._told and self._told in str(error):  # of the operation that this one consists of
            return error
        members = call.group.members
        lost = [members[rank] for rank in error.ranks if rank < len(members)] or members
        if isinstance(error, StalledError) or not self._leaves_for_good or not (ended := self._which_have_ended(lost)):
            return error
        line = script_line(threading.get_ident())
        where = f" at {line}" if line else ""
        self._told = f"{ended} Rank {self._rank} waits in {_text(_context(call))}{where}."
        return PeerLostError(f"{self._told} [{error}]", ranks=error.ranks)

    def _which_have_ended(self, lost: Sequence[int]) -> str:
        """Return how those of lost ranks have ended whose scripts have, as the board knows; "": none has."""
        ranks = set(lost) - {self._rank}
        if (connection := self._connection) is not None and not self._endings.keys() >= ranks:
            self._answered.clear()
            self._send(connection, WhoHasEnded(self._rank, tuple(ranks)))
            self._answered.wait(_GRACE_SEC)
        together: dict[str, list[int]] = {}
        for rank in sorted(ranks & self._endings.keys()):
            together.setdefault(self._endings[rank], []).append(rank)
        return " ".join(f"{_ranks(found)} {ending}" for ending, found in together.items())

    def when_stuck(self, end: Callable[[str], None]) -> None:
        """Call `end` with the reason if this rank waits in a library for a rank that is gone, and does not notice.

        For libraries that wait for other ranks by themselves, as programs of XLA do. It is called on another thread.
        """
        self._when_stuck = end

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
            error = raised() or sys.exception()
            has_raised = error is not None and not isinstance(error, StopIteration)  # that says that data are at an end
            is_done = self._leaves_for_good and not self._has_failed and not has_raised
            ending = "" if self._has_failed else _ending(error, self.num_updates)
            message = RankLeft(self._rank, self._counts(), ending) if is_done else RankFailed(self._rank, ending)
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
                connection.send(Running(self._rank))
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
                    if 0 not in self._left:
                        self._lost.setdefault(0, time.monotonic())
                    self._answered.set()
                for message in messages:
                    self._received(connection, message)
            self._look(connection, time.monotonic())

    def _received(self, connection: Connection, message: Message) -> None:
        match message:
            case Ask():
                self._answer(connection, message)
            case RankLeft():
                self._left[message.rank] = message
                self._endings[message.rank] = ending_of_left(message)
                self._answered.set()
            case RankFailed(rank, ending):
                self._lost.setdefault(rank, time.monotonic())
                self._endings.update({rank: ending} if ending else {})
                self._answered.set()
            case HaveEnded(ranks, endings):
                self._endings.update(zip(ranks, endings, strict=True))
                self._answered.set()
            case Deadlock(text):
                self._end(text)
            case _:
                raise unexpected(message)

    def _answer(self, connection: Connection, asked: Ask) -> None:
        if self._has_failed:
            self._send(connection, RankFailed(self._rank, ""))
            return
        now = time.monotonic()
        keys = {call: key for key, call in self._keys.items()}
        blocked = tuple(keys[call] for call in self._blocked(now) if call in keys)
        entered = tuple(
            (call.rank, call.key)
            for call in asked.calls
            if self._may_enter(self._groups.get(call.group), now) or has_entered(self._groups.get(call.group), call)
        )
        where = script_line(self._thread_of_script)
        inside = "" if blocked else library_line(self._thread_of_script)
        self._send(connection, Answer(self._rank, asked.question, blocked, entered, where, inside))

    def _may_enter(self, group: GroupCalls | None, now: float) -> bool:
        """Return whether a thread of the script's other than the one that called `init()` may enter calls of a group.

        One that used the group last, and is not blocked.
        """
        if group is None or group.handles is not None or group.thread in (0, self._thread_of_script):
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
        if self._when_stuck is not None and self._lost:
            self._look_into_library(self._when_stuck, now)
        blocked = self._blocked(now)
        known = {call: key for key, call in self._keys.items()}
        if [known.get(call) for call in blocked] == [call.key for call in self._reported]:
            if blocked and self._left and not self._has_failed:
                self._judge_alone()
            return
        self._keys = {}
        for call in blocked:
            self._next_key += 1
            self._keys[self._next_key] = call
        self._reported = [self._described(key, call, now) for key, call in self._keys.items()]
        if not self._reported:
            self._send(connection, Running(self._rank))
        else:
            self._send(connection, Blocked(self._rank, tuple(self._reported)))

    def _look_into_library(self, end: Callable[[str], None], now: float) -> None:
        thread = self._thread_of_script
        began = max(*self._lost.values(), now if self._idle_since is None else self._idle_since)
        if now - began < _STUCK * self._patience_sec or stacks.get(thread) or not waits_natively(thread):
            return
        ranks = sorted(self._lost)
        end(
            f"{_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} gone, and rank {self._rank} waits in a library for "
            f"what does not come, at {script_line(thread)}"
        )
        self._when_stuck = None

    def _send(self, connection: Connection, message: Message) -> None:
        with self._lock, contextlib.suppress(ConnectionLost):
            if not self._closed:
                connection.send(message)

    def _judge_alone(self) -> None:
        """See whether this rank waits for one that has left, when there is no board any more."""
        states = {rank: state_of_left(left, self._reported) for rank, left in self._left.items()}
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
        if self._idle_since is None or now - self._idle_since < self._patience_sec:
            return []
        # Frameworks run operations of graphs and programs on threads of their own, and wait for them in C++.
        others = [call for thread in list(stacks) if (call := self._stuck(thread, now)) is not None]
        return others if others and waits_natively(self._thread_of_script) else []

    def _stuck(self, thread: int, now: float) -> Call | None:
        """Return the innermost call that a thread has been in for longer than is ordinary."""
        for call in reversed([each for each in stacks.get(thread, ()) if isinstance(each, Call)]):
            if now - self._since.get(call, now) >= self._patience(call):
                return call
        return None

    def _patience(self, call: Call) -> float:
        return self._patience_sec + (0 if call.data is None else call.data.nbytes / _SLOWEST_BYTES_PER_SEC)

    def _measure_cpu(self, now: float) -> None:
        """Note since when this process has used next to no CPU time."""
        before, used_before = self._cpu
        used = time.process_time()
        self._cpu = (now, used)
        if used - used_before > _IDLE * (now - before):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now

    def _described(self, key: int, call: Call, now: float) -> ReportedCall:
        """Return a call as the board gets it."""
        group = call.group
        own = group.members.index(self._rank)
        others = group.members if call.peer < 0 else (group.members[call.peer],)
        context = _context(call)
        labels = [each for each in context if isinstance(each, str)]
        return ReportedCall(
            rank=self._rank,
            key=key,
            group=group.name,
            kind=call.kind,
            number=call.number,
            name=call.name,
            peer=own,
            awaited=tuple(rank for rank in others if rank != self._rank),
            text=_text(context),
            asked=labels[0] if labels else "",
            age=now - self._since[call],
        )

    def _counts(self) -> dict[str, GroupCounts]:
        return {name: group.counts() for name, group in list(self._groups.items())}


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"each of the ranks {format_ranks(ranks)}"


def _ending(error: BaseException | None, num_updates: int) -> str:
    """Return how this rank's script ends, as the end of a sentence about the rank."""
    after = f" after {num_updates} update{'s' * (num_updates != 1)}" if num_updates else ""
    if error is None:
        return f"has ended{after} (the script is done, or it called shutdown())."
    text = textwrap.shorten(str(error), _MOST_CHARS, placeholder=" ...")
    return f"has ended{after} with {type(error).__name__}{': ' * bool(text)}{text}."


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
