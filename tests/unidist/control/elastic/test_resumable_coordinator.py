"""A coordinator that takes over from one that has died: generations never go back, and nobody is started again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unidist.control.elastic.test_coordinator import AGENT, Desk
from tests.unidist.control.test_coordinator import host_facts
from unidist.control.coordinator import HostLost
from unidist.control.elastic.membership import Membership, Phase
from unidist.control.elastic.resumable_coordinator import ResumableCoordinator, Snapshot
from unidist.control.messages import (
    Assign,
    Change,
    Dismissed,
    Failed,
    Leaving,
    Output,
    Ready,
    Welcome,
    WorkerBeat,
    WorkerHere,
    WorldEnded,
)
from unidist.control.service import Action, Publish

PATIENCE_SEC = 60.0


def coordinator(first: int = 3, least: int = 1, most: int = 4) -> ResumableCoordinator:
    return ResumableCoordinator(
        Membership(num_first=first, min_num=least, max_num=most),
        heartbeat=timedelta(seconds=5),
        silence=timedelta(seconds=10),
        patience=timedelta(seconds=PATIENCE_SEC),
    )


class ResumableDesk(Desk):
    """A job whose launcher may die: what was kept before the last actions is all that is left then."""

    coordinator: ResumableCoordinator

    def __init__(self, *, first: int = 3) -> None:
        self.lost_hosts: list[int] = []
        self._first = first
        super().__init__(first=first)
        self._replace(coordinator(first))
        self.do(self.coordinator.expect_hosts(1))
        self.say(AGENT, host_facts(0))

    def do(self, actions: Iterable[Action]) -> None:
        decided = list(actions)
        if isinstance(self.coordinator, ResumableCoordinator):
            self.kept = json.loads(json.dumps(self.coordinator.news() or self.kept))
        self.lost_hosts += [
            action.event.host
            for action in decided
            if isinstance(action, Publish) and isinstance(action.event, HostLost)
        ]
        super().do(decided)

    def die(self, *, agent: bool = True) -> None:
        """The launcher dies and another takes over; the agent comes back."""
        self.sent.clear()
        self.happened.clear()
        kept = self.kept
        self._replace(coordinator(self._first))
        self.coordinator.restore(kept, now=self.now)
        if agent:
            self.say(AGENT, host_facts(0))

    def back(self, worker: int, generation: int, **told: Any) -> None:
        """A worker comes back, by a new connection of the same number."""
        self.say(worker, WorkerHere(worker, generation=generation, **told))

    def waits(self, worker: int, generation: int, *, progress: int = 5, reason: str = "") -> None:
        self.back(worker, generation, waits=Ready(generation, progress, reason, PATIENCE_SEC))

    def places(self) -> dict[int, tuple[int, int]]:
        """Return generation and rank that each worker was assigned last, by this coordinator."""
        return {
            worker: (message.generation, message.place.rank)
            for worker, messages in self.sent.items()
            for message in messages
            if isinstance(message, Assign)
        }

    def _replace(self, made: ResumableCoordinator) -> None:
        self.coordinator, self.membership = made, made.membership
        self.kept: Snapshot = json.loads(json.dumps(made.snapshot()))


@pytest.fixture
def desk() -> ResumableDesk:
    made = ResumableDesk()
    made.come(0, 1, 2)
    assert made.coordinator.generation == 0
    return made


def test_members_that_come_back_train_on_and_are_told_nothing_new(desk: ResumableDesk) -> None:
    desk.die()
    for worker in (0, 1, 2):
        desk.back(worker, 0)
        assert [type(message) for message in desk.sent[worker]] == [Welcome]
    desk.pass_time(2 * PATIENCE_SEC, alive=(0, 1, 2))
    assert desk.kinds() == []
    desk.lose(1)  # and from here on all is as ever
    assert isinstance(desk.last(0), WorldEnded)
    assert isinstance(desk.last(2), WorldEnded)
    desk.ready(0, generation=0)
    desk.ready(2, generation=0)
    assert desk.places() == {0: (1, 0), 2: (1, 1)}


def test_a_member_lost_meanwhile_is_waited_for_until_its_agent_tells(desk: ResumableDesk) -> None:
    desk.die()
    desk.waits(0, 0, reason="rank 1 was lost")
    desk.waits(2, 0, reason="rank 1 was lost")
    assert desk.places() == {}  # rank 1 might train on, for all that is known
    desk.do(desk.coordinator.end_worker(1, "killed by signal 9", now=desk.now, succeeded=False))
    assert desk.places() == {0: (1, 0), 2: (1, 1)}


def test_who_still_trains_in_a_world_that_others_have_left_is_told(desk: ResumableDesk) -> None:
    desk.die()
    desk.waits(0, 0, reason="rank 1 was lost")
    desk.back(2, 0)
    assert isinstance(desk.last(2), WorldEnded)
    assert desk.last(2).generation == 0
    desk.ready(2, generation=0, progress=5)
    desk.do(desk.coordinator.end_worker(1, "killed", now=desk.now, succeeded=False))
    assert desk.places() == {0: (1, 0), 2: (1, 1)}


def test_a_place_that_was_kept_and_never_arrived_costs_a_generation_and_no_more(desk: ResumableDesk) -> None:
    desk.lose(1)
    desk.ready(0, generation=0, progress=5)
    desk.ready(2, generation=0, progress=5)  # generation 1 is kept; worker 2 does not hear of it
    desk.die()
    desk.back(0, 1)
    desk.waits(2, 0)
    assert isinstance(desk.last(0), WorldEnded)
    assert desk.last(0).generation == 1
    desk.ready(0, generation=1, progress=5)
    assert {generation for generation, _ in desk.places().values()} == {2}
    assert sorted(desk.places()) == [0, 2]


def test_a_ready_that_was_not_answered_is_as_good_as_new(desk: ResumableDesk) -> None:
    desk.lose(1)
    desk.ready(0, generation=0, progress=5)
    desk.die()
    desk.waits(0, 0)
    assert desk.places() == {}  # worker 2 was a member, and has not come back
    desk.waits(2, 0)
    assert {generation for generation, _ in desk.places().values()} == {1}


def test_a_worker_that_was_starting_comes_as_if_nothing_had_been(desk: ResumableDesk) -> None:
    desk.do(desk.coordinator.expect_worker(3, 0))
    desk.die()
    for worker in (0, 1, 2):
        desk.back(worker, 0)
    desk.back(3, -1)
    assert isinstance(desk.last(3), Welcome)
    assert not desk.last(3).is_first
    desk.ready(3)
    assert [type(desk.last(worker)) for worker in (0, 1, 2)] == [Change] * 3


def test_the_first_world_forms_after_a_restart_before_it() -> None:
    desk = ResumableDesk()
    desk.come(0, 1)
    desk.do(desk.coordinator.expect_worker(2, 0))
    desk.die()
    desk.waits(0, -1, progress=-1)
    desk.waits(1, -1, progress=-1)
    desk.waits(2, -1, progress=-1)
    assert desk.places() == {0: (0, 0), 1: (0, 1), 2: (0, 2)}


def test_what_a_worker_asked_for_is_done_by_the_next_coordinator(desk: ResumableDesk) -> None:
    desk.die()
    desk.back(0, 0)
    desk.back(1, 0)
    desk.back(2, 0, leaving=True)
    assert isinstance(desk.last(0), Change)
    for worker in (0, 1, 2):
        desk.ready(worker, generation=0, progress=6)
    assert isinstance(desk.last(2), Dismissed)
    assert desk.places() == {0: (1, 0), 1: (1, 1)}


def test_a_worker_that_came_to_its_end_meanwhile_costs_the_others_nothing(desk: ResumableDesk) -> None:
    desk.die()
    desk.back(0, 0)
    desk.do(desk.coordinator.end_worker(1, "exit code 0", now=desk.now, succeeded=True))
    desk.back(2, 0, detached=True)
    desk.do(desk.coordinator.end_worker(2, "exit code 0", now=desk.now, succeeded=True))
    assert [type(message) for message in desk.sent[0]] == [Welcome]
    assert "lost" not in desk.kinds()


def test_who_does_not_come_back_is_given_up_in_the_end(desk: ResumableDesk) -> None:
    desk.die()
    desk.back(0, 0)
    desk.back(1, 0)
    desk.pass_time(PATIENCE_SEC - 1, alive=(0, 1))
    assert desk.kinds() == []
    desk.pass_time(2, alive=(0, 1))
    assert desk.kinds()[:2] == ["hung", "lost"]
    assert isinstance(desk.last(0), WorldEnded)


def test_a_host_that_does_not_come_back_is_lost_with_its_workers_and_not_let_in_later(desk: ResumableDesk) -> None:
    desk.die(agent=False)
    for worker in (0, 1):
        desk.back(worker, 0)
    desk.now += PATIENCE_SEC + 1
    desk.do(desk.coordinator.tick(desk.now))
    assert desk.lost_hosts == [0]
    assert desk.membership.workers == {}
    desk.say(AGENT, host_facts(0))
    assert isinstance(desk.last(AGENT), Failed)


def test_a_host_that_had_not_come_yet_is_lost_at_once_and_not_let_in_later() -> None:
    desk = ResumableDesk()
    desk.do(desk.coordinator.expect_hosts(2))
    desk.die()
    desk.do(desk.coordinator.tick(desk.now))
    assert desk.lost_hosts == [1]
    desk.say(8, host_facts(1))
    assert isinstance(desk.last(8), Failed)


def test_of_a_host_that_was_lost_before_the_next_launcher_hears_again(desk: ResumableDesk) -> None:
    desk.lose(AGENT)
    desk.die(agent=False)
    desk.lost_hosts.clear()
    desk.do(desk.coordinator.tick(desk.now))
    assert desk.lost_hosts == [0]


def test_who_was_given_up_before_is_refused_after(desk: ResumableDesk) -> None:
    desk.lose(1)
    desk.die()
    desk.back(1, 0)
    assert isinstance(desk.last(1), Failed)


def test_there_is_news_only_when_something_that_counts_has_changed(desk: ResumableDesk) -> None:
    assert desk.coordinator.news() is None
    desk.say(AGENT, Output(0, 1, b""))
    desk.say(0, WorkerBeat(steps=7))
    assert desk.coordinator.news() is None
    list(desk.coordinator.lost(1, "closed", desk.now))
    found = desk.coordinator.news()
    assert found is not None
    assert found["generation"] == 1
    assert desk.coordinator.news() is None


@pytest.mark.parametrize("damage", [{"generation": None}, {"membership": {}}, {"gone": 3}])
def test_a_damaged_snapshot_is_an_error(desk: ResumableDesk, damage: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        coordinator().restore({**desk.kept, **damage}, now=0.0)


STEPS = st.lists(
    st.tuples(st.sampled_from(("expect", "come", "ready", "lose", "leave", "end", "die")), st.integers(0, 4)),
    max_size=40,
)


@given(STEPS)
def test_whatever_happens_a_snapshot_gives_the_same_job_and_generations_grow(steps: list[tuple[str, int]]) -> None:
    desk = ResumableDesk(first=2)
    assigned: dict[int, int] = {}
    seen = -1
    for kind, number in steps:
        worker = desk.membership.workers.get(number)
        linked = worker is not None and worker.peer is not None
        before = desk.coordinator.generation
        if kind == "expect" and number not in assigned and worker is None:
            desk.do(desk.coordinator.expect_worker(number, 0))
            assigned[number] = -1
        elif kind == "come" and worker is not None and not linked:
            desk.back(number, assigned[number])
        elif kind == "ready" and linked and worker is not None and worker.phase is not Phase.WAITING:
            desk.ready(number, generation=assigned[number], progress=3)
        elif kind == "lose" and linked:
            desk.lose(number)
        elif kind == "leave" and linked:
            desk.say(number, Leaving())
        elif kind == "end" and worker is not None:
            desk.do(desk.coordinator.end_worker(number, "exit code 1", now=desk.now, succeeded=False))
        elif kind == "die":
            desk.die()
        for taken, (generation, _) in desk.places().items():
            assigned[taken] = max(assigned[taken], generation)
        assert desk.coordinator.generation >= before
        seen = max([seen, *assigned.values()])
        assert desk.coordinator.generation >= seen
        kept = json.loads(json.dumps(desk.coordinator.snapshot()))
        again = coordinator(first=2)
        again.restore(kept, now=desk.now)
        assert again.snapshot() == desk.coordinator.snapshot() == desk.kept
