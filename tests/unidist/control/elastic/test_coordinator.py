"""What the coordinator of an elastic job decides: no socket, no thread, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest

from tests.unidist.control.test_coordinator import host_facts
from unidist.control.codec import Message, WireError
from unidist.control.elastic.coordinator import Beat as WorkerIsAlive
from unidist.control.elastic.coordinator import ElasticCoordinator, JobEvent
from unidist.control.elastic.membership import NO_STATE, Membership
from unidist.control.elastic.replicas import ReplicaShape
from unidist.control.messages import (
    Assign,
    Beat,
    Change,
    Detached,
    Dismissed,
    Failed,
    Happened,
    Leaving,
    RankHere,
    Ready,
    Standby,
    StateLost,
    StepTimeReport,
    Welcome,
    WorkerBeat,
    WorkerHere,
    WorldEnded,
)
from unidist.control.service import Action, Drop, Publish, Send
from unidist.topology import Topology

AGENT = 1000
PATIENCE_SEC = 600.0


class Desk:
    """A coordinator with an agent of host 0, and what it did. Worker n speaks by peer n."""

    def __init__(
        self,
        *,
        first: int = 2,
        least: int = 1,
        most: int = 4,
        stall: float | None = None,
        shape: ReplicaShape | None = None,
    ) -> None:
        self.membership = Membership(num_first=first, min_num=least, max_num=most, shape=shape)
        self.coordinator = ElasticCoordinator(
            self.membership,
            heartbeat=timedelta(seconds=5),
            silence=timedelta(seconds=10),
            stall=None if stall is None else timedelta(seconds=stall),
        )
        self.sent: dict[int, list[Any]] = {}
        self.happened: list[JobEvent] = []
        self.beats: list[WorkerIsAlive] = []
        self.dropped: list[int] = []
        self.now = 0.0
        self.do(self.coordinator.expect_hosts(1))
        self.say(AGENT, host_facts(0))

    def say(self, peer: int, message: Message) -> None:
        self.do(self.coordinator.received(peer, message, self.now))

    def come(self, *workers: int) -> None:
        for worker in workers:
            self.do(self.coordinator.expect_worker(worker, 0))
            self.say(worker, WorkerHere(worker=worker))
            self.ready(worker)

    def ready(self, worker: int, *, progress: int = NO_STATE, reason: str = "", generation: int | None = None) -> None:
        number = self.coordinator.generation if generation is None else generation
        self.say(worker, Ready(number, progress, reason, PATIENCE_SEC))

    def lose(self, peer: int) -> None:
        self.do(self.coordinator.lost(peer, "closed", self.now))

    def pass_time(self, seconds: float, *, alive: Iterable[int] = ()) -> None:
        """Let time pass in steps in which the agent and these workers beat."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            self.say(AGENT, Beat())
            for worker in alive:
                self.say(worker, WorkerBeat(steps=0))
            self.do(self.coordinator.tick(self.now))

    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.sent.setdefault(action.peer, []).append(action.message)
            elif isinstance(action, Publish):
                if isinstance(action.event, JobEvent):
                    self.happened.append(action.event)
                elif isinstance(action.event, WorkerIsAlive):
                    self.beats.append(action.event)
            elif isinstance(action, Drop):
                self.dropped.append(action.peer)

    def last(self, worker: int) -> Any:
        return self.sent[worker][-1]

    def kinds(self) -> list[str]:
        return [each.kind for each in self.happened]


def place(desk: Desk, worker: int) -> tuple[int, int]:
    """Return rank and number of ranks that a worker was told last."""
    found = desk.last(worker).place
    return found.rank, found.world_size


def test_workers_are_welcomed_and_get_their_places_when_all_have_come() -> None:
    desk = Desk()
    desk.come(0)
    assert [type(message) for message in desk.sent[0]] == [Welcome]
    desk.come(1)
    assert [place(desk, worker) for worker in (0, 1)] == [(0, 2), (1, 2)]
    assert desk.last(0).generation == 0
    assert desk.kinds()[-1] == "generation"


def test_a_worker_that_is_not_awaited_or_comes_twice_is_turned_away() -> None:
    desk = Desk()
    desk.come(0)
    desk.say(7, WorkerHere(worker=7))
    desk.say(8, WorkerHere(worker=0))
    assert desk.dropped == [7, 8]
    assert isinstance(desk.last(7), Failed)
    assert isinstance(desk.last(8), Failed)


def test_a_lost_member_ends_the_generation_for_the_others_at_once() -> None:
    desk = Desk(first=3)
    desk.come(0, 1, 2)
    desk.lose(1)
    for worker in (0, 2):
        assert isinstance(desk.last(worker), WorldEnded)
        assert desk.last(worker).ranks == (1,)
    assert desk.coordinator.generation == 1


def test_survivors_form_the_next_generation_when_all_of_them_are_back() -> None:
    desk = Desk(first=3)
    desk.come(0, 1, 2)
    desk.lose(1)
    desk.ready(0, progress=4, reason="lost", generation=0)
    assert isinstance(desk.last(0), WorldEnded)
    desk.ready(2, progress=5, reason="lost", generation=0)
    assert desk.last(2) == Assign(1, Topology(0, 2, 0, 2), progress=5, needs_sync=True, beat_sec=1.0)
    assert desk.last(0).place.rank == 1


def test_a_failure_that_only_a_member_saw_ends_the_generation_for_all() -> None:
    desk = Desk()
    desk.come(0, 1)
    desk.ready(0, progress=1, reason="the network", generation=0)
    assert isinstance(desk.last(1), WorldEnded)
    assert "rank 0 could not go on: the network" in desk.last(1).text


def test_members_that_come_back_by_agreement_do_not_disturb_the_others() -> None:
    desk = Desk(first=2)
    desk.come(0, 1)
    desk.come(2)
    assert desk.last(0) == desk.last(1) == Change(0, leaving=(), joining=True)
    desk.ready(0, progress=3, generation=0)
    assert isinstance(desk.last(1), Change)
    desk.ready(1, progress=3, generation=0)
    assert [place(desk, worker) for worker in (0, 1, 2)] == [(0, 3), (1, 3), (2, 3)]
    assert desk.last(0).needs_sync


def test_a_worker_that_asks_for_leave_goes_when_all_have_come_back() -> None:
    desk = Desk(first=3)
    desk.come(0, 1, 2)
    desk.say(1, Leaving())
    assert isinstance(desk.last(0), Change)
    for worker in (0, 1, 2):
        desk.ready(worker, progress=8, generation=0)
    assert isinstance(desk.last(1), Dismissed)
    assert place(desk, 0) == (0, 2)
    assert desk.last(0).needs_sync is False
    desk.say(1, Detached())
    desk.lose(1)
    assert desk.dropped == []
    assert "lost" not in desk.kinds()


def test_a_worker_that_asks_for_leave_when_another_one_dies_gives_away_what_it_has_first() -> None:
    desk = Desk(first=3)
    desk.come(0, 1, 2)
    desk.say(1, Leaving())
    desk.lose(2)
    desk.ready(1, progress=8, generation=0)  # first, while 0 is a member still
    desk.ready(0, progress=8, generation=0)
    assert [place(desk, worker) for worker in (0, 1)] == [(0, 2), (1, 2)]
    generation = desk.coordinator.generation
    desk.pass_time(1, alive=(0, 1))
    assert desk.last(0) == Change(generation, leaving=(1,), joining=False)
    for worker in (0, 1):
        desk.ready(worker, progress=9, generation=generation)
    assert isinstance(desk.last(1), Dismissed)
    assert place(desk, 0) == (0, 1)


def test_the_last_one_waits_for_a_successor_if_one_is_to_come() -> None:
    desk = Desk(first=2)
    desk.come(0, 1)
    desk.say(0, Leaving())
    desk.do(desk.coordinator.expect_worker(2, 0))
    desk.lose(1)
    desk.ready(0, progress=8, generation=0)
    assert not isinstance(desk.last(0), Dismissed)
    desk.say(2, WorkerHere(worker=2))
    desk.ready(2)
    assert [place(desk, worker) for worker in (0, 2)] == [(0, 2), (1, 2)]


def test_one_that_waits_already_gets_the_state_of_those_that_all_leave() -> None:
    desk = Desk(first=2, most=2)
    desk.come(0, 1, 2)
    for worker in (0, 1):
        desk.say(worker, Leaving())
    for worker in (0, 1):
        desk.ready(worker, progress=8, generation=0)
    assert [place(desk, worker) for worker in (0, 1, 2)] == [(0, 3), (1, 3), (2, 3)]
    assert desk.last(2).progress == 8
    generation = desk.coordinator.generation
    for worker in (0, 2, 1):
        desk.ready(worker, progress=9, generation=generation)
    assert [type(desk.last(worker)) for worker in (0, 1)] == [Dismissed, Dismissed]
    assert place(desk, 2) == (0, 1)


def test_members_are_told_who_leaves_also_when_others_follow() -> None:
    desk = Desk(first=3)
    desk.come(0, 1, 2)
    desk.say(1, Leaving())
    assert desk.last(0) == desk.last(2) == Change(0, leaving=(1,), joining=False)
    desk.pass_time(2, alive=(0, 1, 2))
    assert len(desk.sent[0]) == 3
    desk.say(2, Leaving())
    assert desk.last(0) == desk.last(1) == Change(0, leaving=(1, 2), joining=False)
    assert desk.kinds().count("change") == 1


def test_a_worker_that_fails_before_it_was_in_a_world_disturbs_nobody() -> None:
    desk = Desk()
    desk.come(0, 1)
    desk.do(desk.coordinator.expect_worker(2, 0))
    desk.say(2, WorkerHere(worker=2))
    desk.say(2, Detached())
    desk.lose(2)
    desk.do(desk.coordinator.end_worker(2, "exit code 1", now=desk.now, succeeded=False))
    assert isinstance(desk.last(0), Assign)
    assert isinstance(desk.last(1), Assign)
    assert "lost" not in desk.kinds()


def test_a_lost_state_is_told_to_the_launcher() -> None:
    desk = Desk()
    desk.come(0, 1)
    desk.say(1, StateLost(reason="it was held by rank 0 alone"))
    assert desk.happened[-1] == JobEvent("state_lost", {"worker": 1, "reason": "it was held by rank 0 alone"})


def test_a_checkpoint_is_told_to_the_log_and_nothing_else_is() -> None:
    desk = Desk()
    desk.come(0, 1)
    desk.say(0, Happened(event="checkpoint", fields={"commit": 7}))
    assert desk.happened[-1] == JobEvent("checkpoint", {"worker": 0, "commit": 7})
    with pytest.raises(WireError, match="Happened"):
        desk.say(0, Happened(event="lost", fields={"rank": 1}))


def test_a_silent_member_is_given_up_and_may_not_come_back() -> None:
    desk = Desk(first=2)
    desk.come(0, 1)
    desk.pass_time(9, alive=[0])
    assert "hung" not in desk.kinds()
    desk.pass_time(3, alive=[0])
    assert desk.kinds()[-3:] == ["hung", "lost", "ended"]
    assert desk.dropped == [1]
    desk.say(50, WorkerHere(worker=1))
    assert isinstance(desk.last(50), Failed)


def test_while_the_launcher_stood_still_nobody_was_silent_or_took_no_step() -> None:
    desk = Desk(first=2, stall=30.0)
    desk.come(0, 1)
    desk.say(0, WorkerBeat(steps=2))
    desk.say(1, WorkerBeat(steps=1))
    desk.now += 100.0
    desk.coordinator.stood_still(100.0, desk.now)
    desk.do(desk.coordinator.tick(desk.now))
    assert not {"hung", "lost"} & set(desk.kinds())
    desk.pass_time(31, alive=[0, 1])
    assert "hung" in desk.kinds()


def test_a_member_that_takes_no_step_while_others_did_is_given_up() -> None:
    desk = Desk(first=2, stall=30.0)
    desk.come(0, 1)
    desk.say(0, WorkerBeat(steps=2))
    desk.say(1, WorkerBeat(steps=1))
    desk.pass_time(29, alive=[0, 1])
    assert "hung" not in desk.kinds()
    desk.pass_time(3, alive=[0, 1])
    assert [each.fields["worker"] for each in desk.happened if each.kind == "hung"] == [1]


@pytest.mark.parametrize(("waiting", "hung"), [((0, 2), [1]), ((0, 1, 2), []), ((), [])])
def test_of_members_that_are_equally_far_those_are_given_up_that_others_wait_for(
    waiting: tuple[int, ...], hung: list[int]
) -> None:
    desk = Desk(first=3, stall=5.0)
    desk.come(0, 1, 2)
    for _ in range(7):
        desk.now += 1.0
        desk.say(AGENT, Beat())
        for worker in range(3):
            desk.say(worker, WorkerBeat(steps=2, waits=worker in waiting))
        desk.do(desk.coordinator.tick(desk.now))
    assert [each.fields["worker"] for each in desk.happened if each.kind == "hung"] == hung


def test_a_member_that_does_not_come_back_is_given_up_before_the_others_end_their_wait() -> None:
    desk = Desk(first=3)
    desk.come(0, 1, 2)
    desk.say(0, Ready(generation=0, progress=1, reason="it has waited too long", patience=20.0))
    desk.pass_time(10, alive=[0, 1, 2])
    desk.coordinator.stood_still(10.0, desk.now)  # in which nobody could come back
    desk.pass_time(17, alive=[0, 1, 2])
    assert "hung" not in desk.kinds()
    desk.say(1, Ready(generation=0, progress=1, reason="", patience=100.0))
    desk.pass_time(3, alive=[0, 1, 2])
    assert [each.fields["worker"] for each in desk.happened if each.kind == "hung"] == [2]
    assert desk.happened[-1].kind == "generation"


def test_what_a_beat_tells_of_the_steps_is_handed_on() -> None:
    desk = Desk(first=2)
    desk.come(0, 1)
    desk.say(1, WorkerBeat(steps=2, step_times=StepTimeReport(commits=2)))
    assert desk.beats == [WorkerIsAlive(1, 2, StepTimeReport(commits=2))]


def test_when_all_wait_alike_nobody_is_blamed() -> None:
    desk = Desk(first=2, stall=30.0)
    desk.come(0, 1)
    for worker in (0, 1):
        desk.say(worker, WorkerBeat(steps=3))
    desk.pass_time(100, alive=[0, 1])
    assert "hung" not in desk.kinds()


def test_an_end_in_good_order_disturbs_nobody_and_a_bad_one_does() -> None:
    desk = Desk(first=3)
    desk.come(0, 1, 2)
    desk.say(0, Detached())
    desk.lose(0)
    desk.do(desk.coordinator.end_worker(0, "exit code 0", now=0.0, succeeded=True))
    assert "ended" not in desk.kinds()
    desk.say(1, Detached())
    desk.do(desk.coordinator.end_worker(1, "exit code 1", now=0.0, succeeded=False))
    assert isinstance(desk.last(2), WorldEnded)


def test_one_that_comes_when_others_have_finished_is_let_go() -> None:
    desk = Desk(first=2)
    desk.come(0, 1)
    desk.say(0, Detached())
    desk.do(desk.coordinator.end_worker(0, "exit code 0", now=0.0, succeeded=True))
    desk.come(2)
    assert isinstance(desk.last(2), Dismissed)
    assert desk.kinds().count("generation") == 1


def test_with_its_host_all_workers_are_lost() -> None:
    desk = Desk(first=2)
    desk.come(0, 1)
    desk.lose(AGENT)
    assert desk.kinds().count("lost") == 2
    assert sorted(desk.dropped) == [0, 1]
    assert desk.membership.workers == {}


def test_ranks_of_an_ended_generation_may_not_meet_in_the_next() -> None:
    desk = Desk(first=2)
    desk.come(0, 1)
    desk.lose(1)
    desk.say(60, RankHere(generation=0, epoch=0, rank=0, node_rank=0, world_size=2))
    assert desk.last(60).kind == "PeerLostError"
    assert "generation 0" in desk.last(60).text


def test_it_tells_when_there_are_too_few_and_when_there_are_enough_again() -> None:
    desk = Desk(first=2, least=2)
    desk.come(0, 1)
    desk.lose(1)
    desk.ready(0, progress=2, reason="lost", generation=0)
    assert desk.kinds()[-1] == "short"
    desk.come(5)
    assert isinstance(desk.last(0), Assign)
    assert "enough" in desk.kinds()


def test_a_rank_of_an_incomplete_replica_is_told_that_it_stands_by_each_time() -> None:
    desk = Desk(first=4, shape=ReplicaShape(outer=2, equation="pipeline(2)"))
    desk.come(0, 1, 2, 3)
    for lost, newcomer, progress in ((3, 4, 5), (4, 5, 9)):
        desk.lose(lost)
        generation = desk.coordinator.generation - 1
        for worker in (0, 1, 2):
            assert not isinstance(desk.last(worker), Standby)
            desk.ready(worker, progress=progress, generation=generation)
        assert [type(desk.last(worker)) for worker in (0, 1, 2)] == [Assign, Standby, Assign]
        assert desk.happened[-1].fields == {"worker": 1, "rank": 1, "replica": "pipeline(2)"}
        desk.come(newcomer)
        assert isinstance(desk.last(0), Change)
        for worker in (0, 2):
            desk.ready(worker, progress=progress + 1)
        assert [desk.last(worker).place.rank for worker in (0, 1, 2, newcomer)] == [0, 1, 2, 3]


def test_the_job_says_what_it_waits_for_to_have_a_replica() -> None:
    desk = Desk(first=2, shape=ReplicaShape(outer=2, equation="pipeline(2)"))
    desk.come(0, 1)
    desk.lose(1)
    desk.ready(0, progress=5, generation=0)
    assert desk.happened[-1].kind == "short"
    assert desk.happened[-1].fields == {
        "waiting": 1,
        "needed": 2,
        "replica": "pipeline(2)",
        "missing": [1],
        "newcomers": 1,
    }


def test_who_stands_by_is_let_go_when_the_others_have_come_to_the_end() -> None:
    desk = Desk(first=4, shape=ReplicaShape(outer=2, equation="pipeline(2)"))
    desk.come(0, 1, 2, 3)
    desk.lose(3)
    for worker in (0, 1, 2):
        desk.ready(worker, progress=5, generation=0)
    desk.say(0, Detached())
    desk.do(desk.coordinator.end_worker(0, "exit code 0", now=desk.now, succeeded=True))
    assert isinstance(desk.last(1), Dismissed)
    assert isinstance(desk.last(2), Assign)
