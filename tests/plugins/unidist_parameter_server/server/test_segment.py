"""The state of a segment: what a replica does with a step that its primary has half applied, and who is waited for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unidist.buffer import DType
from unidist.errors import StalledError
from unidist_parameter_server.optimizers import Momentum
from unidist_parameter_server.server import StoreSegment
from unidist_parameter_server.server.segment import DeposedError
from unidist_parameter_server.store.shards import FlatMemory, ParameterSlot, cut
from unidist_parameter_server.wire import SegmentLayout

COUNT = 64
RULES, PRESENT = [Momentum(1.0)], [True]


def segment(num_workers: int = 2, *, needed: int = 0) -> StoreSegment:
    shards = cut([FlatMemory(DType.FLOAT64, COUNT, (ParameterSlot(0, 0, COUNT),))], 256)
    assert len(shards) == 2
    return StoreSegment(SegmentLayout("name", 0, shards, 0, num_workers, 1, needed, 10, 1))


def push_together(made: StoreSegment, worker: int, number: int, label: int, value: float, **others: Any) -> bool:
    def receive(arrays: Any) -> None:
        for array in arrays:
            array[:] = value

    return made.push_together(worker, number, label, PRESENT, RULES, receive, timeout_sec=0.05, **others)


def test_a_step_that_the_primary_had_half_applied_is_applied_once_to_each_shard() -> None:
    replica = segment(needed=2)
    mean = np.full(32, 3.0)
    replica.replicated(0, 1, [(0, 1), (1, 1)], mean, RULES, PRESENT, 1.0)  # and the primary is gone
    replica.promote()
    for worker in range(2):
        replica.join(worker, 0)
    assert push_together(replica, 0, 1, 0, 2.0, waits=False)
    assert push_together(replica, 1, 1, 0, 4.0, waits=True)
    assert replica.step == 1
    for each in replica.shards:
        assert each.version == 1
        assert np.array_equal(each.contents.values, np.full(32, -3.0))
    assert push_together(replica, 0, 1, 0, 2.0, waits=True), "repeated: it counts, as it did"
    assert replica.step == 1


def test_a_step_that_the_primary_had_applied_counts_when_it_is_pushed_again() -> None:
    replica = segment(needed=2)
    for index in range(2):
        replica.replicated(index, 1, [(0, 1), (1, 1)], np.full(32, 3.0), RULES, PRESENT, 1.0)
    replica.promote()
    replica.join(0, 0)
    assert replica.step == 1
    assert push_together(replica, 0, 1, 0, 2.0, waits=True)
    assert np.array_equal(replica.shards[0].contents.values, np.full(32, -3.0))


def test_who_was_deposed_passes_on_nothing_more() -> None:
    replica = segment()
    replica.replicated(0, 1, [(0, 1)], np.ones(32), RULES, PRESENT, 1.0)
    replica.promote()
    with pytest.raises(DeposedError):
        replica.replicated(0, 2, [(0, 2)], np.ones(32), RULES, PRESENT, 1.0)
    assert replica.shards[0].version == 1


def test_workers_have_some_time_to_come_to_the_server_that_has_taken_over() -> None:
    replica = segment(3)
    replica.promote()
    replica.join(0, 7)
    assert replica.clocks == [7, 0, 0]
    with pytest.raises(StalledError, match="workers 1, 2"):
        replica.finish_step(0, 8, 2, 0.05)
    for worker in (1, 2):
        replica.join(worker, 6)
    replica.finish_step(0, 8, 2, 0.05)
    replica.finish_step(0, 8, 2, 0.05)
    assert replica.clocks == [8, 6, 6], "a step that is told twice counts once"


def test_a_segment_is_left_when_all_have_gone() -> None:
    made = segment()
    assert not made.is_left, "nobody has come yet"
    made.join(0, 0)
    made.join(1, 0)
    made.leave(0)
    assert not made.is_left
    made.leave(1)
    assert made.is_left
