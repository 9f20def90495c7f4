"""An elastic job as a state machine: the real coordinator, and workers that are modelled, in any order of events.

The states of a worker, and what takes it from one to the next (docs/internals.md has the picture):

    starting -> waiting      it connects, and says `Ready`
    waiting  -> training     it gets `Assign`
    training -> waiting      a peer is lost, the generation ends, or a commit after `Change`
    waiting  -> dismissed    it was to leave, and has handed on what it had
    any      -> dead         it is killed

Messages to a worker come late, in their order. The launcher may die, with all messages that are under way; the workers
come back to the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unidist.control.elastic.test_resumable_coordinator import ResumableDesk
from unidist.control.elastic.membership import NO_STATE
from unidist.control.messages import (
    Assign,
    Change,
    Dismissed,
    Failed,
    Leaving,
    Ready,
    Standby,
    Welcome,
    WorldEnded,
)

MOST_WORKERS = 7
MOST_RANKS = 4
LIVE = ("waiting", "training")


@dataclass
class ModelWorker:
    """A process with the script, as far as the coordinator has to do with it.

    Args:
        state: see the module's text.
        generation: the last one that it was assigned to.
        size: number of ranks of that one.
        needs_sync: in that one everybody takes over what is furthest, before the first step.
        progress: steps that its state has.
        wants_change: it was asked to come back at the next commit.
        is_leaving: it was asked to end.
        num_read: messages that it has got from the present launcher.
    """

    state: str = "starting"
    generation: int = -1
    size: int = 0
    needs_sync: bool = False
    world_progress: int = NO_STATE
    progress: int = NO_STATE
    wants_change: bool = False
    is_leaving: bool = False
    num_read: int = 0


class ElasticJobModel(RuleBasedStateMachine):
    """Everything that may happen to a job on one host, and what has to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = ResumableDesk(first=2)
        self.workers: dict[int, ModelWorker] = {}
        self.has_stepped: set[int] = set()
        self.last_step = (-1, 0)  # of which generation, and how far it has come

    @initialize()
    def begins(self) -> None:
        for number in (0, 1):
            self.starts(number)

    # What the launcher, the machine and the user do

    @rule()
    def one_more_is_started(self) -> None:
        if len(self.workers) < MOST_WORKERS:
            self.starts(len(self.workers))

    def starts(self, number: int) -> None:
        self.workers[number] = ModelWorker()
        self.desk.do(self.desk.coordinator.expect_worker(number, 0))

    @rule(choice=st.integers(0, 6))
    def connects(self, choice: int) -> None:
        for number in self.one_of(choice, lambda number: self.workers[number].state == "starting"):
            self.desk.back(number, -1)
            self.comes_back(number, "")

    @rule(choice=st.integers(0, 6), seen_by_agent=st.booleans())
    def is_killed(self, choice: int, seen_by_agent: bool) -> None:
        for number in self.one_of(choice, lambda number: self.workers[number].state in LIVE):
            self.workers[number].state = "dead"
            if seen_by_agent:
                self.desk.do(self.desk.coordinator.process_ended(number, now=self.desk.now))
            else:
                self.desk.lose(number)
            self.desk.do(self.desk.coordinator.end_worker(number, "killed", now=self.desk.now, succeeded=False))

    @rule(choice=st.integers(0, 6))
    def is_asked_to_end(self, choice: int) -> None:
        if sum(self.may_leave(number) for number in self.workers) > 1:
            for number in self.one_of(choice, self.may_leave):
                self.workers[number].is_leaving = True
                self.desk.say(number, Leaving())

    def may_leave(self, number: int) -> bool:
        return self.workers[number].state in LIVE and not self.workers[number].is_leaving

    @rule()
    def the_launcher_dies_and_another_takes_over(self) -> None:
        self.desk.die()
        for number, worker in self.workers.items():
            worker.num_read = 0
            if worker.state in LIVE:
                told: dict[str, Any] = {"leaving": True} if worker.is_leaving else {}
                if worker.state == "waiting":
                    told["waits"] = self.ready(worker, "")
                self.desk.back(number, worker.generation, **told)

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.desk.pass_time(seconds, alive=[number for number, worker in self.workers.items() if worker.state in LIVE])

    # What a worker does

    @rule(choice=st.integers(0, 6))
    def reads_a_message(self, choice: int) -> None:
        for number in self.one_of(choice, self.has_message):
            self.read(number)

    def read(self, number: int) -> None:
        worker = self.workers[number]
        message = self.desk.sent[number][worker.num_read]
        worker.num_read += 1
        match message:
            case Assign(generation, place, progress, needs_sync) if worker.state == "waiting":
                worker.state, worker.generation, worker.size = "training", generation, place.world_size
                worker.needs_sync, worker.world_progress = needs_sync, progress
                worker.wants_change = False
            case Change(generation) if generation == worker.generation:
                worker.wants_change = True
            case WorldEnded(generation, text) if worker.state == "training" and generation == worker.generation:
                self.comes_back(number, text)
            case Dismissed():
                worker.state = "dismissed"
            case Failed() if worker.is_leaving:  # `Dismissed` was lost with its launcher
                worker.state = "dismissed"
            case _:
                assert isinstance(message, (Welcome, Standby, Assign, Change, WorldEnded)), message

    def has_message(self, number: int) -> bool:
        worker = self.workers[number]
        return worker.state in LIVE and worker.num_read < len(self.desk.sent.get(number, ()))

    @rule(choice=st.integers(0, 6))
    def notices_a_lost_peer(self, choice: int) -> None:
        def may(number: int) -> bool:
            worker = self.workers[number]
            peers = [each for each in self.workers.values() if each.generation == worker.generation]
            return worker.state == "training" and any(each.state != "training" for each in peers)

        for number in self.one_of(choice, may):
            self.comes_back(number, "a peer was lost")

    @rule()
    def a_world_takes_a_step(self) -> None:
        for generation in self.worlds():
            self.step(generation)

    def step(self, generation: int) -> None:
        members = self.members(generation)
        first = next(iter(members.values()))
        if generation not in self.has_stepped:
            self.has_stepped.add(generation)
            furthest = max(worker.progress for worker in members.values())
            assert max(0, first.world_progress) == max(0, furthest), "what is furthest is not what the others take over"
            for worker in members.values():
                assert first.needs_sync or worker.progress == furthest
                worker.progress = max(0, furthest)
        for worker in members.values():
            worker.progress += 1
        generation_before, progress_before = self.last_step
        assert generation >= generation_before
        assert first.progress > progress_before, f"step {progress_before} of generation {generation_before} is lost"
        self.last_step = (generation, first.progress)
        if any(worker.wants_change for worker in members.values()):
            for number in members:
                self.comes_back(number, "")

    def comes_back(self, number: int, reason: str) -> None:
        worker = self.workers[number]
        worker.state = "waiting"
        self.desk.say(number, self.ready(worker, reason))

    @staticmethod
    def ready(worker: ModelWorker, reason: str) -> Ready:
        return Ready(worker.generation, worker.progress, reason, 600.0)

    # What there is

    def one_of(self, choice: int, may: Callable[[int], bool]) -> list[int]:
        """Return one of the workers that may; none if there is none."""
        found = [number for number in self.workers if may(number)]
        return [found[choice % len(found)]] if found else []

    def members(self, generation: int) -> dict[int, ModelWorker]:
        return {
            number: worker
            for number, worker in self.workers.items()
            if worker.generation == generation and worker.state == "training"
        }

    def worlds(self) -> list[int]:
        """Return the generations that could take a step: all of their ranks are there."""
        generations = {worker.generation for worker in self.workers.values() if worker.state == "training"}
        return [each for each in generations if len(found := self.members(each)) == next(iter(found.values())).size]

    # What has to hold

    @invariant()
    def no_two_generations_train(self) -> None:
        assert len(self.worlds()) <= 1

    @invariant()
    def what_was_committed_is_held_by_somebody_or_all_that_had_it_were_killed(self) -> None:
        _, committed = self.last_step
        left = [worker for worker in self.workers.values() if worker.state in LIVE]
        if not any(worker.progress >= committed for worker in left):
            assert not any(
                worker.progress >= committed and worker.state == "dismissed" for worker in self.workers.values()
            )
            self.last_step = (self.last_step[0], max([0, *(worker.progress for worker in left)]))

    def teardown(self) -> None:
        """Every wait ends: with nothing more in the way, those that are left train together soon."""
        while sum(worker.state in LIVE and not worker.is_leaving for worker in self.workers.values()) < 2:
            number = len(self.workers)
            self.starts(number)
            self.desk.back(number, -1)
            self.comes_back(number, "")
        for number, worker in self.workers.items():
            if worker.state == "starting":  # it never comes: its process ends
                worker.state = "dead"
                self.desk.do(self.desk.coordinator.end_worker(number, "killed", now=self.desk.now, succeeded=False))
        for _ in range(60):
            self.let_all_go_on()
            num_live = sum(worker.state in LIVE for worker in self.workers.values())
            for generation in self.worlds():
                is_full = len(self.members(generation)) == min(num_live, MOST_RANKS)
                self.step(generation)
                if is_full:
                    return
        raise AssertionError(f"nobody trains: {self.workers}")

    def let_all_go_on(self) -> None:
        for number, worker in self.workers.items():
            while self.has_message(number):
                self.read(number)
            peers = [each for each in self.workers.values() if each.generation == worker.generation]
            if worker.state == "training" and any(each.state in ("dead", "dismissed") for each in peers):
                self.comes_back(number, "a peer was lost")
        self.time_passes_for_all()

    def time_passes_for_all(self) -> None:
        self.desk.pass_time(2.0, alive=[number for number, worker in self.workers.items() if worker.state in LIVE])


TestElasticJobModel = ElasticJobModel.TestCase
TestElasticJobModel.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True, deadline=None)
