"""Stages in order, whatever finishes first. No engine: the operations of the lanes are made up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from unidist.communicator import COMPLETED, Work
from unidist.errors import PeerLostError, StalledError
from unidist.hierarchical.pipeline import OperationPipeline, OperationStage, WorkOfParts

pytestmark = pytest.mark.usefixtures("leak_check")
LONG = timedelta(seconds=60)


class Lane:
    """A communicator that completes an operation when it is told to."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.started: list[str] = []
        self.completed: set[str] = set()

    def stage(self, name: str) -> OperationStage:
        def start() -> Work:
            self.started.append(name)
            return Told(self, name)

        return OperationStage(self.number, start)


class Told(Work):
    def __init__(self, lane: Lane, name: str) -> None:
        self._lane, self._name = lane, name

    def wait(self, timeout: timedelta | None = None) -> None:
        assert self.done()

    def done(self) -> bool:
        return self._name in self._lane.completed


@pytest.fixture
def pipeline() -> Iterator[OperationPipeline]:
    def stalled(what: str, limit: timedelta) -> BaseException:
        return StalledError(f"{what} took {limit.total_seconds():g} seconds")

    def translate(what: str, error: BaseException, lane: int) -> BaseException:
        return PeerLostError(f"{what}, lane {lane}: {error}")

    made = OperationPipeline(LONG, translate=translate, stalled=stalled)
    yield made
    made.end(RuntimeError("over"))


def test_the_first_stage_begins_at_once_and_the_next_when_it_is_done(pipeline: OperationPipeline) -> None:
    inside, back = Lane(0), Lane(2)
    work = pipeline.post("a", [inside.stage("a"), back.stage("a")])
    assert (inside.started, back.started) == (["a"], [])
    inside.completed.add("a")
    assert not work.done()
    assert back.started == ["a"]
    back.completed.add("a")
    assert work.done()
    work.wait()


def test_an_operation_never_overtakes_an_earlier_one_on_a_lane(pipeline: OperationPipeline) -> None:
    inside, between, back = Lane(0), Lane(1), Lane(2)
    first = pipeline.post("a", [inside.stage("a"), between.stage("a"), back.stage("a")])
    second = pipeline.post("b", [between.stage("b"), back.stage("b")])
    pipeline.advance()
    assert between.started == [], "b has to wait, for other ranks may have finished a's first stage already"
    inside.completed.add("a")
    pipeline.advance()
    assert between.started == ["a", "b"]
    between.completed.add("b")
    pipeline.advance()
    assert back.started == []
    between.completed.add("a")
    pipeline.advance()
    assert back.started == ["a", "b"]
    back.completed |= {"a", "b"}
    first.wait()
    second.wait()


def test_a_stage_may_be_nothing_or_done_at_once(pipeline: OperationPipeline) -> None:
    ran: list[int] = []
    stages = [
        OperationStage(0, lambda: None),
        OperationStage(1, lambda: COMPLETED),
        OperationStage(2, lambda: ran.append(1)),
    ]
    pipeline.post("a", stages).wait()
    assert ran == [1]


def test_what_nobody_waits_for_moves_on_too(pipeline: OperationPipeline) -> None:
    inside, back = Lane(0), Lane(2)
    pipeline.post("a", [inside.stage("a"), back.stage("a")])
    inside.completed.add("a")
    deadline = time.monotonic() + 30
    while back.started != ["a"]:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_failing_stage_fails_all_that_is_under_way(pipeline: OperationPipeline) -> None:
    def fail() -> Work:
        raise RuntimeError("wire cut")

    lane = Lane(0)
    other = pipeline.post("b", [lane.stage("b")])
    work = pipeline.post("a", [OperationStage(1, fail)])
    for each in (work, other):
        with pytest.raises(PeerLostError, match="a, lane 1: wire cut"):
            each.wait()


def test_a_wait_ends_at_its_time(pipeline: OperationPipeline) -> None:
    work = pipeline.post("a", [Lane(0).stage("a")])
    with pytest.raises(StalledError, match=r"a took 0\.05 seconds"):
        work.wait(timedelta(seconds=0.05))
    with pytest.raises(StalledError):
        work.wait()


def test_parts_are_one_work(pipeline: OperationPipeline) -> None:
    lane = Lane(0)
    work = WorkOfParts([pipeline.post(name, [lane.stage(name)]) for name in "ab"])
    lane.completed.add("a")
    assert not work.done()
    lane.completed.add("b")
    work.wait()
    assert work.done()


def test_the_thread_ends_with_the_last_pipeline() -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "unidist-hierarchy"]

    made = [
        OperationPipeline(LONG, translate=lambda w, e, n: e, stalled=lambda w, t: StalledError(w)) for _ in range(2)
    ]
    assert len(names()) == 1
    made[0].end(RuntimeError())
    assert len(names()) == 1
    made[1].end(RuntimeError())
    assert names() == []
