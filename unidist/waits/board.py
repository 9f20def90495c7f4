"""The service of rank 0 at which the ranks report that they are blocked. Decides; does no I/O.

When a rank reports a call in which it is blocked, all ranks are asked at one moment what they do and whether they have
entered that call. A call that a rank still is in when it answers, it was in when it was asked: so the answers that say
"blocked" all hold at the moment of the question, and a deadlock among them is one.

When a rank is lost, nothing is judged any more: the others' operations fail, each at its own moment, and they end or
form another generation, which has a board of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from unidist.control import Action, Message, Send, Service, unexpected
from unidist.observation import GroupCalls
from unidist.waits.detection import (
    UNEVEN_BATCHES,
    Activity,
    BlockedCall,
    RankState,
    find_deadlock,
    missing_ranks,
    waiting_line,
)
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

__all__ = ["Board", "blocked_calls", "ending_of_left", "has_entered", "state_of_left"]

_ANSWER_SEC = 2.0
"""A rank that does not answer by then computes with the interpreter locked: it is taken to be able to go on."""
_ASK_AGAIN_SEC = 5.0
_ENDED_SEC = 0.2
"""A rank that has ended says so before its connections close; its word may still come."""


class Board(Service):
    """Collects what ranks wait for.

    Args:
        report_every: seconds after which a line says who is waited for; 0: never.
        report: is given that line.
    """

    def __init__(self, report_every: float, report: Callable[[str], None]) -> None:
        self._report_every = report_every
        self._ask_again = min(_ASK_AGAIN_SEC, report_every / 2) if report_every else _ASK_AGAIN_SEC
        self._report = report
        self._peers: dict[int, int] = {}  # rank by peer
        self._blocked: dict[int, tuple[float, tuple[ReportedCall, ...]]] = {}  # since when, its calls
        self._left: dict[int, RankLeft] = {}
        self._endings: dict[int, str] = {}  # of those, and of ranks whose scripts have failed
        self._lost: set[int] = set()
        self._asked_for: list[tuple[int, set[int], float]] = []  # by whom, which ranks, when
        self._asked_at = float("-inf")
        self._is_news = False
        self._questions = itertools.count(1)
        self._question = 0  # the open one; 0: none
        self._calls: tuple[ReportedCall, ...] = ()  # that it is about
        self._answers: dict[int, Answer] = {}
        self._reported: dict[tuple[Any, ...], float] = {}
        self._is_over = False

    @override
    def received(self, peer: int, message: Message, now: float) -> Iterable[Action]:
        if not isinstance(message, (Blocked, Running, RankLeft, RankFailed, WhoHasEnded, Answer)):
            raise unexpected(message)
        rank = self._peers[peer] = message.rank
        match message:
            case Blocked(calls=calls):
                self._blocked[rank] = (now, calls)
                self._is_news = True
            case Running():
                self._blocked.pop(rank, None)
            case RankLeft():
                self._blocked.pop(rank, None)
                self._left[rank] = message
                self._endings[rank] = ending_of_left(message)
                self._is_news = True
                if rank == 0:  # this board ends with it; the others judge for themselves what they wait for it for
                    return self._pass_on(message)
                return self._tell_ended(now)
            case RankFailed():
                self._has_lost()
                if message.ending:
                    self._endings[rank] = message.ending
                return self._pass_on(message) if rank == 0 else self._tell_ended(now)
            case WhoHasEnded(ranks=ranks):
                self._has_lost()
                self._asked_for.append((peer, set(ranks), now))
                return self._tell_ended(now)
            case Answer() if message.question == self._question:
                self._answers[rank] = message
                if len(self._answers) == len(self._peers) - len(self._left.keys() & set(self._peers.values())):
                    return self._judge(now)
        return ()

    @override
    def lost(self, peer: int, reason: str, now: float) -> Iterable[Action]:
        """A rank that died: the engine reports it. Nothing is known of what it would have done."""
        rank = self._peers.pop(peer)
        self._blocked.pop(rank, None)
        if rank not in self._left:
            self._lost.add(rank)
            self._has_lost()
            return [*self._tell_ended(now), *self._pass_on(RankFailed(rank, ""))]
        return self._tell_ended(now)

    def _pass_on(self, message: RankLeft | RankFailed) -> list[Action]:
        return [Send(each, message) for each, other in self._peers.items() if other != message.rank]

    def _has_lost(self) -> None:
        """Judge nothing from now on."""
        self._is_over = True
        self._question = 0
        self._blocked.clear()

    def _tell_ended(self, now: float) -> list[Action]:
        """Answer those who ask which ranks have ended, once that is known of each."""
        told: list[Action] = []
        waiting = []
        for peer, ranks, since in self._asked_for:
            if ranks <= self._endings.keys() | self._lost or now - since > _ENDED_SEC:
                known = sorted(ranks & self._endings.keys())
                told.append(Send(peer, HaveEnded(tuple(known), tuple(self._endings[rank] for rank in known))))
            else:
                waiting.append((peer, ranks, since))
        self._asked_for = waiting
        return told

    @override
    def tick(self, now: float) -> Iterable[Action]:
        if self._asked_for:
            return self._tell_ended(now)
        if self._question:
            return self._judge(now) if now - self._asked_at > _ANSWER_SEC else ()
        if self._is_over or not self._blocked or not (self._is_news or now - self._asked_at > self._ask_again):
            return ()
        self._is_news = False
        self._asked_at = now
        self._question = next(self._questions)
        self._answers = {}
        self._calls = tuple(call for _, calls in self._blocked.values() for call in calls)
        question = Ask(self._question, self._calls)
        return [Send(peer, question) for peer, rank in self._peers.items() if rank not in self._left]

    def _judge(self, now: float) -> Iterable[Action]:
        self._question = 0
        states = {rank: self._answered(rank, answer) for rank, answer in self._answers.items()}
        for rank, left in self._left.items():
            states[rank] = state_of_left(left, self._calls)
        deadlock = find_deadlock(states)
        if deadlock is not None:
            self._is_over = True
            return [Send(peer, Deadlock(deadlock.text)) for peer in self._peers]
        self._report_waits(states, now)
        return ()

    def _answered(self, rank: int, answer: Answer) -> RankState:
        own = [call for call in self._calls if call.rank == rank and call.key in answer.blocked]
        return RankState(
            Activity.BLOCKED if own else Activity.RUNNING,
            blocked_calls(own),
            answer.where,
            set(answer.entered),
            answer.inside,
        )

    def _report_waits(self, states: Mapping[int, RankState], now: float) -> None:
        """Report each call in which ranks wait for one that runs: one line for all ranks that are in it."""
        if not self._report_every:
            return
        together: dict[tuple[Any, ...], list[tuple[int, BlockedCall, float]]] = {}
        for rank, (since, calls) in self._blocked.items():
            if rank in states and states[rank].calls:
                key = (calls[0].group, calls[0].kind, calls[0].number, calls[0].name)
                together.setdefault(key, []).append((rank, states[rank].calls[0], now - since + calls[0].age))
        self._reported = {key: at for key, at in self._reported.items() if key in together}
        for key, waiting in together.items():
            longest = max(seconds for _, _, seconds in waiting)
            missing = sorted({peer for rank, call, _ in waiting for peer in missing_ranks(rank, call, states)})
            if missing and longest >= self._report_every and now - self._reported.get(key, 0.0) >= self._report_every:
                self._reported[key] = now
                self._report(
                    waiting_line(waiting[0][1], longest, sorted(rank for rank, _, _ in waiting), missing, states)
                )


def blocked_calls(calls: Iterable[ReportedCall]) -> tuple[BlockedCall, ...]:
    """Return calls as they were received, for the detection."""
    return tuple(BlockedCall(call.key, call.awaited, call.text, call.asked) for call in calls)


def has_entered(group: GroupCalls | None, call: ReportedCall) -> bool:
    """Return whether the rank that `group` is the record of has entered the counterpart of another rank's call."""
    return group is not None and group.entered(call.kind, call.number, call.name, call.peer)


def ending_of_left(left: RankLeft) -> str:
    """Return how a rank has left, and what to do."""
    return f"{left.ending} {UNEVEN_BATCHES}"


def state_of_left(left: RankLeft, calls: Sequence[ReportedCall]) -> RankState:
    """Return the state of a rank that has left, from the counts that it left behind."""
    entered = set()
    for call in calls:
        counts = left.groups.get(call.group)
        if counts is None:
            continue
        group = GroupCalls(call.group, (), "")
        group.restore(counts)
        if has_entered(group, call):
            entered.add((call.rank, call.key))
    return RankState(Activity.LEFT, entered=entered, ending=left.ending)
