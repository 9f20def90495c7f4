"""Clocks: who may continue under each bound, and which gradients of a step count."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidist_parameter_server.store.clocks import Clocks, StepArrivals, WorkerState, listed, waits_for_step

ACTIVE = WorkerState.ACTIVE


def started(num_workers: int) -> tuple[Clocks, list[int], list[int]]:
    clocks, members = [0] * num_workers, [int(ACTIVE)] * num_workers
    return Clocks(clocks, members), clocks, members


@given(st.integers(1, 5), st.integers(0, 4), st.randoms(use_true_random=False))
def test_no_worker_is_more_than_the_bound_ahead_and_somebody_may_continue(
    num_workers: int, bound: int, chance: random.Random
) -> None:
    clocks, numbers, _ = started(num_workers)
    for _ in range(60):
        able = [worker for worker in range(num_workers) if not clocks.waits_for(worker, bound)]
        assert able, "the slowest may always continue"
        clocks.finish_step(chance.choice(able))
        assert max(numbers) - min(numbers) <= bound + 1, "at the end of the step in which it has to wait"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 4))
def test_who_is_waited_for(numbers: list[int], bound: int) -> None:
    clocks = Clocks(list(numbers), [ACTIVE] * len(numbers))
    for worker, own in enumerate(numbers):
        assert clocks.waits_for(worker, None) == []
        slow = [other for other, clock in enumerate(numbers) if clock < own - bound]
        assert clocks.waits_for(worker, bound) == slow


def test_a_worker_that_has_left_is_not_waited_for() -> None:
    clocks, _, _ = started(3)
    for _ in range(3):
        clocks.finish_step(0)
        clocks.finish_step(1)
    assert clocks.waits_for(0, 1) == [2]
    clocks.leave(2)
    assert clocks.waits_for(0, 1) == []
    assert clocks.active == [0, 1]


def test_a_worker_that_joins_begins_at_the_slowest() -> None:
    clocks, numbers, _ = started(3)
    clocks.leave(2)
    for worker in (0, 0, 0, 1, 1):
        clocks.finish_step(worker)
    clocks.join(2)
    assert numbers == [3, 2, 2]
    clocks.leave(0)
    clocks.leave(1)
    clocks.leave(2)
    clocks.join(1)
    assert numbers[1] == 3, "alone it goes on from the largest of all"


def test_the_first_gradients_of_a_step_count_and_late_ones_do_not() -> None:
    counted = [0, 0, 0]
    arrivals = StepArrivals([0, 0, 0], counted, needed=2)
    assert not arrivals.is_late(2, 0, 0, is_closed=False)
    arrivals.arrive(2, 0)
    assert not arrivals.try_to_close(0)
    assert arrivals.missing(0) == [0, 1]
    assert arrivals.is_late(2, 0, 0, is_closed=False), "one gradient of each worker"
    arrivals.arrive(0, 0)
    assert arrivals.try_to_close(0)
    assert arrivals.try_to_close(0), "may be repeated"
    assert arrivals.members() == [0, 2]
    assert arrivals.is_late(1, 0, 0, is_closed=True)
    assert arrivals.is_late(1, 0, 1, is_closed=False), "of the step before"
    assert not arrivals.is_late(1, 1, 1, is_closed=False)


@given(st.integers(1, 4), st.data())
def test_with_backup_workers_all_come_to_the_end_of_the_same_number_of_calls(
    num_workers: int, data: st.DataObject
) -> None:
    """A simulation: workers push in any order, and wait as the rules say. Nobody waits for ever."""
    backup = data.draw(st.integers(0, num_workers - 1))
    chance = data.draw(st.randoms(use_true_random=False))
    calls_to_make = 12
    version = 0
    arrivals = StepArrivals([0] * num_workers, [0] * num_workers, num_workers - backup)
    calls, labels = [0] * num_workers, [0] * num_workers
    waits_until: list[Callable[[], bool]] = [lambda: True] * num_workers

    def push(worker: int) -> None:
        nonlocal version
        calls[worker] += 1
        label = labels[worker]
        if arrivals.is_late(worker, label, version, is_closed=False):
            return
        arrivals.arrive(worker, label)
        must_wait = not backup or waits_for_step(calls[worker], version)
        if arrivals.try_to_close(label):
            version += 1
        if must_wait:
            waits_until[worker] = lambda: version > label

    while any(made < calls_to_make for made in calls):
        able = [worker for worker in range(num_workers) if calls[worker] < calls_to_make and waits_until[worker]()]
        assert able, f"all wait: {calls} calls, {version} updates, {backup} of {num_workers} are not needed"
        worker = chance.choice(able)
        labels[worker] = version
        if chance.random() < 0.3:  # others may come in between reading and pushing
            other = chance.choice(able)
            if other != worker:
                labels[other] = version
                push(other)
        if waits_until[worker]() and calls[worker] < calls_to_make:
            push(worker)
    assert version >= calls_to_make
    if not backup:
        assert version == calls_to_make


@pytest.mark.parametrize(("workers", "text"), [([1], "worker 1"), ([0, 2], "workers 0, 2")])
def test_workers_in_messages(workers: list[int], text: str) -> None:
    assert listed(workers) == text
