"""Cost of a worker for its coordinator: the same in a job of hundreds as in one of tens. No socket, no clock.

What the coordinator does is counted in Python's operations, which do not depend on the machine or its load.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest

from tests.unidist.control.test_coordinator import host_facts
from unidist.control.codec import Message, encode
from unidist.control.elastic.coordinator import ElasticCoordinator
from unidist.control.elastic.membership import NO_STATE, Membership
from unidist.control.messages import Assign, Change, Give, RankHere, Ready, Welcome, WorkerBeat, WorkerHere, WorldEnded
from unidist.control.service import Action, Drop, Send

FEW, MANY = 32, 256
SLOTS = 8
RANK = 100_000
"""A worker n speaks by peer n, its rank in a meeting by peer RANK + n, the agent of host h by peer -1 - h."""


@dataclass
class Work:
    """What was done: Python's operations, messages of the coordinator, and their bytes."""

    operations: int = 0
    messages: int = 0
    num_bytes: int = 0

    def __sub__(self, other: Work) -> Work:
        return Work(
            self.operations - other.operations, self.messages - other.messages, self.num_bytes - other.num_bytes
        )


@dataclass
class Crowd:
    """A job of `number` workers, eight on each host, with the work that its coordinator has done."""

    number: int
    room: int | None = None
    work: Work = field(default_factory=Work)
    sent: dict[int, list[Any]] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        membership = Membership(num_first=self.number, min_num=1, max_num=self.number)
        seconds = timedelta(seconds=5)
        self.coordinator = ElasticCoordinator(membership, heartbeat=seconds, silence=2 * seconds)
        hosts = range(-(-self.number // SLOTS))
        self.do(lambda: self.coordinator.expect_hosts(len(hosts)))
        for host in hosts:
            self.say(-1 - host, host_facts(host))
            if self.room is not None:
                room = self.room
                self.do(lambda host=host, room=room: self.coordinator.limit_host(host, room))  # type: ignore[misc]

    def do(self, call: Callable[[], Iterable[Action]]) -> None:
        actions = self.counted(call)
        for action in actions:
            if isinstance(action, Send):
                self.work.messages += 1
                self.work.num_bytes += len(encode(action.message))
                self.sent.setdefault(action.peer, []).append(action.message)
            elif isinstance(action, Drop):
                self.dropped.append(action.peer)

    def counted(self, call: Callable[[], Iterable[Action]]) -> list[Action]:
        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            self.work.operations += event == "opcode"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return list(call())
        finally:
            sys.settrace(before)

    def say(self, peer: int, message: Message) -> None:
        self.do(lambda: self.coordinator.received(peer, message, 0.0))

    def start(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.do(lambda number=number: self.coordinator.expect_worker(number, number // SLOTS % 1000))  # type: ignore[misc]
            self.say(number, WorkerHere(number))
            self.ready(number, NO_STATE)

    def ready(self, number: int, progress: int, reason: str = "") -> None:
        generation = next(
            (each.generation for each in reversed(self.sent.get(number, [])) if isinstance(each, Assign)), -1
        )
        self.say(number, Ready(generation, progress, reason, 600.0))

    def meet(self) -> None:
        """Have all ranks come to a meeting, and go through a round in which they say the same, and a first one."""
        size = self.number
        generation = self.coordinator.generation
        for number in range(size):
            self.say(RANK + number, RankHere(generation, 0, number, number // SLOTS, size))
        for turn in range(2):
            for number in range(size):
                self.say(RANK + number, Give(generation, turn, "Z2xvbw=="))


def form(crowd: Crowd) -> None:
    crowd.start(range(crowd.number))
    assert sum(isinstance(messages[-1], Assign) for messages in crowd.sent.values()) == crowd.number


def meet(crowd: Crowd) -> None:
    crowd.meet()
    assert crowd.sent[RANK][-1].runs == (("Z2xvbw==", crowd.number),)


def beat(crowd: Crowd) -> None:
    for number in range(crowd.number):
        crowd.say(number, WorkerBeat(3))
    crowd.do(lambda: crowd.coordinator.tick(1.0))


def lose_a_quarter(crowd: Crowd) -> None:
    """A quarter of all dies at once; the others come back, and are told of one end."""
    lost = range(0, crowd.number, 4)
    for number in lost:
        crowd.do(lambda number=number: crowd.coordinator.lost(number, "closed", 1.0))  # type: ignore[misc]
    for number in sorted(set(range(crowd.number)) - set(lost)):
        assert [type(message) for message in crowd.sent[number]].count(WorldEnded) == 1
        crowd.ready(number, 3, "lost")
    assert isinstance(crowd.sent[1][-1], Assign)


def replace_a_quarter(crowd: Crowd) -> None:
    """As many new ones join the others, who come back for them."""
    crowd.start(range(crowd.number, crowd.number + crowd.number // 4))
    crowd.do(lambda: crowd.coordinator.tick(3.0))
    for number in sorted(set(range(crowd.number)) - set(range(0, crowd.number, 4))):
        assert isinstance(crowd.sent[number][-1], Change)
        crowd.ready(number, 3)
    assert isinstance(crowd.sent[crowd.number][-1], Assign)


@pytest.mark.parametrize("room", [None, SLOTS], ids=["without spares", "with limits of hosts"])
def test_work_and_messages_per_worker_do_not_grow_with_the_job(room: int | None) -> None:
    phases = (form, meet, beat, lose_a_quarter, replace_a_quarter)
    found: dict[int, dict[str, Work]] = {}
    for number in (FEW, MANY):
        crowd = Crowd(number, room=room)
        found[number] = {}
        for phase in phases:
            before = Work(**vars(crowd.work))
            phase(crowd)
            found[number][phase.__name__] = crowd.work - before
        assert crowd.dropped == []
    for phase in phases:
        few, many = (found[number][phase.__name__] for number in (FEW, MANY))
        for name, most in (("operations", 1.5), ("messages", 1.05), ("num_bytes", 1.15)):
            grown = (getattr(many, name) / MANY) / max(1e-9, getattr(few, name) / FEW)
            assert grown < most or not getattr(many, name), (phase.__name__, name, grown)


def test_all_workers_together_send_a_bounded_number_of_heartbeats() -> None:
    def beat_sec(number: int, heartbeat: float = 5.0) -> float:
        membership = Membership(num_first=number, min_num=1, max_num=number)
        silence = timedelta(seconds=2 * heartbeat)
        coordinator = ElasticCoordinator(membership, heartbeat=silence / 2, silence=silence)
        list(coordinator.expect_worker(0, 0))
        actions = list(coordinator.received(1, WorkerHere(0), 0.0))
        assert isinstance(actions[0], Send)
        assert isinstance(actions[0].message, Welcome)
        return actions[0].message.beat_sec

    assert [beat_sec(number) for number in (2, 500, 1000)] == [1.0, 1.0, 2.0]
    assert beat_sec(100_000) == pytest.approx(10 / 3)  # but three of each before it is taken for lost
    assert beat_sec(2, heartbeat=1.0) == 0.4
