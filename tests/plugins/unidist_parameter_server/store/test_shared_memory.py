"""The store in shared memory, with processes as workers and no framework."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from unidist.buffer import DType
from unidist.errors import PeerLostError, StalledError
from unidist_parameter_server.optimizers import Adam, AddDifference, Momentum, Rule
from unidist_parameter_server.store import Contents, ProcessLocks, Push, SharedMemoryStore
from unidist_parameter_server.store.memory import StoreShape, make_arrays
from unidist_parameter_server.store.shards import FlatMemory, ParameterSlot, StoreShard, cut

pytestmark = pytest.mark.parallel

Array = np.ndarray[Any, Any]
COUNT = 1000
MEMORY = FlatMemory(DType.FLOAT64, COUNT, (ParameterSlot(0, 0, 600), ParameterSlot(1, 600, 400)))
LONG = timedelta(seconds=60)
processes = multiprocessing.get_context("fork")


class World:
    """Memory, a file for locks, and a barrier that workers in forked processes share.

    Args:
        num_workers: number of workers.
        slots: names of the optimizer's arrays.
        together: gradients are collected.
        backup: see the strategy.
        partition: bytes of a shard.
        log_length: see `StoreShape`.
        timeout: of the store.
    """

    def __init__(
        self,
        num_workers: int,
        slots: Sequence[str] = (),
        *,
        together: bool = False,
        backup: int = 0,
        partition: int = 2000,
        log_length: int = 0,
        timeout: timedelta = LONG,
    ) -> None:
        self.partition = partition
        self.shards = cut([MEMORY], partition)
        self.shape = StoreShape(self.shards, len(slots), num_workers, 2, together, log_length)
        self.slots = slots
        self.needed = num_workers - backup
        self.timeout = timeout
        self.memory = mmap.mmap(-1, self.shape.nbytes)
        descriptor, self.path = tempfile.mkstemp()
        os.close(descriptor)
        self.barrier = processes.Barrier(num_workers)
        self.results: Any = processes.Queue()
        self.running: list[Any] = []

    def store(self, worker: int, *, meets: bool = True) -> SharedMemoryStore:
        """Return the store of a worker, in its process."""
        return SharedMemoryStore(
            self.shape,
            self.slots,
            memoryview(self.memory),
            ProcessLocks(self.path),
            worker,
            needed=self.needed,
            barrier=(lambda: self.barrier.wait(60)) if meets else lambda: None,
            timeout=self.timeout,
        )

    def start(self, worker: int, function: Callable[[SharedMemoryStore], Any], *, meets: bool = True) -> Any:
        """Run a function with a worker's store in a process of its own."""

        def run() -> None:
            try:
                self.results.put((worker, function(self.store(worker, meets=meets))))
            except Exception as exc:
                self.results.put((worker, exc))

        process = processes.Process(target=run, daemon=True)
        process.start()
        self.running.append(process)
        return process

    def run(self, function: Callable[[SharedMemoryStore], Any]) -> list[Any]:
        """Run a function on all workers, and return what each has returned, or raised."""
        for worker in range(self.shape.num_workers):
            self.start(worker, function)
        return self.collect(self.shape.num_workers)

    def collect(self, number: int) -> list[Any]:
        """Return so many results, in the order of workers."""
        return [
            result for _, result in sorted((self.results.get(timeout=90) for _ in range(number)), key=lambda r: r[0])
        ]

    def close(self) -> None:
        """End what runs."""
        for process in self.running:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        with contextlib.suppress(OSError):
            os.unlink(self.path)


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    """Return a function that makes worlds, which end with the test."""
    made: list[World] = []

    def make(*args: Any, **kwargs: Any) -> World:
        made.append(World(*args, **kwargs))
        return made[-1]

    yield make
    for world in made:
        world.close()


def gradient(worker: int, number: int) -> Array:
    """Return a gradient that is known from who pushes it and when."""
    return np.random.default_rng((worker, number)).standard_normal(COUNT)


def push_of(worker: int, number: int, rule: Rule, **others: Any) -> Push:
    values = gradient(worker, number)
    return Push(number, lambda shard: values[shard.begin : shard.begin + shard.count], [rule] * 2, [True] * 2, **others)


def values_of(store: SharedMemoryStore) -> Array:
    found = np.empty(COUNT)
    for index, shard in enumerate(store.shards):
        store.read(
            index, lambda values, shard=shard: found.__setitem__(slice(shard.begin, shard.begin + shard.count), values)
        )
    return found


def replayed(world: World, rule: Rule, logs: Sequence[Sequence[tuple[int, int]]], factor: float = 1.0) -> Array:
    """Return the values that the logged pushes give, in a store of one process."""
    alone = World(1, world.slots, partition=world.partition)
    try:
        store = alone.store(0, meets=False)
        found = np.empty(COUNT)
        for index, (shard, log) in enumerate(zip(world.shards, logs, strict=True)):
            for number, (worker, theirs) in enumerate(log, start=1):
                values = gradient(worker, theirs)
                part = values[shard.begin : shard.begin + shard.count]
                store.push(index, Push(number, lambda _, part=part: part, [rule] * 2, [True] * 2, factor))
            store.read(
                index,
                lambda values, shard=shard: found.__setitem__(slice(shard.begin, shard.begin + shard.count), values),
            )
        return found
    finally:
        alone.close()


def test_a_push_is_applied_once(make_world: Callable[..., World]) -> None:
    store = make_world(1, ("mean", "mean_of_squares")).store(0, meets=False)
    rule = Adam(0.1)
    for _ in range(3):
        for index in range(len(store.shards)):
            assert store.push(index, push_of(0, 1, rule)) == 1
    first = values_of(store)
    assert np.abs(first).max() > 0.05
    for index in range(len(store.shards)):
        assert store.push(index, push_of(0, 2, rule)) == 2
    assert not np.array_equal(values_of(store), first)


def test_parameters_without_a_gradient_keep_values_and_state(make_world: Callable[..., World]) -> None:
    store = make_world(1, ("momentum",)).store(0, meets=False)
    rule = Momentum(1.0, momentum=0.9)
    values = np.ones(COUNT)
    for number, present in enumerate(([True, False], [True, True]), start=1):
        for index in range(len(store.shards)):
            store.push(index, Push(number, lambda shard: values[: shard.count], [rule] * 2, present))
    found = values_of(store)
    assert np.allclose(found[:600], -1.0 - 1.9)
    assert np.allclose(found[600:], -1.0), "its momentum has begun with the second push"


def test_the_final_values_are_those_of_the_logged_pushes_in_their_order(make_world: Callable[..., World]) -> None:
    world = make_world(3, ("momentum",), log_length=200)
    rule = Momentum(0.01, momentum=0.9)

    def work(store: SharedMemoryStore) -> tuple[Array, list[list[tuple[int, int]]]]:
        for number in range(1, 31):
            for index in range(len(store.shards)):
                store.push(index, push_of(store.worker, number, rule, factor=1 / 3))
            store.finish_step(None)
        world.barrier.wait(60)
        return values_of(store), [store.log(index) for index in range(len(store.shards))]

    outcomes = world.run(work)
    values, logs = outcomes[0]
    for log in logs:
        assert sorted(log) == [(worker, number) for worker in range(3) for number in range(1, 31)]
        assert [number for worker, number in log if worker == 1] == list(range(1, 31)), "each worker's in order"
    assert all(np.array_equal(values, other) for other, _ in outcomes)
    assert np.array_equal(values, replayed(world, rule, logs, 1 / 3))


def test_a_synchronous_step_applies_the_mean_in_the_same_bits_every_time(make_world: Callable[..., World]) -> None:
    rule = Momentum(0.01, momentum=0.9)

    def train() -> Array:
        world = make_world(3, ("momentum",), together=True)

        def work(store: SharedMemoryStore) -> Array:
            for number in range(1, 16):
                assert store.push_together(push_of(store.worker, number, rule), number - 1, waits=True)
                assert store.version == number
            return values_of(store)

        outcomes = world.run(work)
        assert all(np.array_equal(outcomes[0], other) for other in outcomes)
        return outcomes[0]

    found = train()
    assert np.array_equal(found, train())
    values, momentum = np.zeros(COUNT), np.zeros(COUNT)
    for number in range(1, 16):
        momentum = 0.9 * momentum + sum(gradient(worker, number) for worker in range(3)) / 3
        values -= 0.01 * momentum
    assert np.abs(found - values).max() < 1e-13


def test_with_backup_workers_the_first_gradients_count(make_world: Callable[..., World]) -> None:
    world = make_world(3, together=True, backup=1)
    rule = Momentum(1.0)

    def work(store: SharedMemoryStore) -> tuple[bool, Array]:
        if store.worker == 1:
            deadline = time.monotonic() + 60
            while store.version < 1:
                assert time.monotonic() < deadline
                time.sleep(0.001)
        counts = store.push_together(push_of(store.worker, 1, rule), 0, waits=True)
        return counts, values_of(store)

    outcomes = world.run(work)
    assert [counts for counts, _ in outcomes] == [True, False, True]
    for _, values in outcomes:
        assert np.allclose(values, -(gradient(0, 1) + gradient(2, 1)) / 2, rtol=0, atol=1e-15)


def test_a_fast_worker_is_at_most_the_bound_ahead_of_a_slow_one(make_world: Callable[..., World]) -> None:
    world = make_world(2)

    def work(store: SharedMemoryStore) -> list[int]:
        ahead = []
        for _ in range(20):
            deadline = time.monotonic() + 60
            while store.worker == 1 and (now := store.clocks)[0] < min(now[1] + 4, 20):  # until the other is held
                assert time.monotonic() < deadline
                time.sleep(0.001)
            store.finish_step(3)
            clocks = store.clocks
            ahead.append(clocks[store.worker] - clocks[1 - store.worker])
        return ahead

    fast, slow = world.run(work)
    assert max(fast) == 3, "it is held there, and gets there"
    assert max(slow) <= 3


def test_who_is_lost_is_not_waited_for_under_a_bound(make_world: Callable[..., World]) -> None:
    world = make_world(2)

    def work(store: SharedMemoryStore) -> int:
        if store.worker == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(10):
            store.finish_step(2)
        return store.clocks[0]

    for worker in range(2):
        world.start(worker, work)
    assert world.collect(1) == [10]


def test_a_synchronous_step_says_who_was_lost(make_world: Callable[..., World]) -> None:
    world = make_world(2, together=True)

    def work(store: SharedMemoryStore) -> None:
        if store.worker == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        store.push_together(push_of(store.worker, 1, Momentum(1.0)), 0, waits=True)

    for worker in range(2):
        world.start(worker, work)
    (error,) = world.collect(1)
    assert isinstance(error, PeerLostError)
    assert error.ranks == (1,)
    assert "worker 1 was lost or has ended, and worker 0 waits for its gradient in step 1" in str(error)


@pytest.mark.parametrize("together", [True, False])
def test_who_waits_too_long_says_for_whom(make_world: Callable[..., World], together: bool) -> None:
    world = make_world(2, together=together, timeout=timedelta(seconds=0.5))

    def work(store: SharedMemoryStore) -> None:
        if store.worker == 1:
            time.sleep(30)
        elif together:
            store.push_together(push_of(0, 1, Momentum(1.0)), 0, waits=True)
        else:
            store.finish_step(0)

    for worker in range(2):
        world.start(worker, work)
    (error,) = world.collect(1)
    assert isinstance(error, StalledError)
    assert "waited 0 s for worker 1, which it" in str(error)
    assert "worker 1 (process " in str(error)
    assert "has made 0 steps, the last" in str(error)


def test_who_waits_for_the_lock_of_a_stopped_worker_says_so(make_world: Callable[..., World]) -> None:
    world = make_world(2, timeout=timedelta(seconds=0.5))

    def work(store: SharedMemoryStore) -> None:
        if store.worker == 1:

            def stop(shard: StoreShard) -> Array:
                world.barrier.wait(60)
                os.kill(os.getpid(), signal.SIGSTOP)
                return np.zeros(shard.count)

            store.push(0, Push(1, stop, [AddDifference()] * 2, [True] * 2))
        else:
            world.barrier.wait(60)
            store.push(0, push_of(0, 1, Momentum(1.0)))

    for worker in range(2):
        world.start(worker, work)
    (error,) = world.collect(1)
    assert isinstance(error, StalledError)
    assert "lock of shard 0, which worker 1 (process " in str(error)


def test_a_worker_that_is_killed_leaves_no_torn_shard_and_no_lock(make_world: Callable[..., World]) -> None:
    """One worker pushes throughout, another is killed while it pushes, and comes back, many times."""
    rounds, rule = 40, Adam(0.01)
    world = make_world(2, ("mean", "mean_of_squares"), partition=4000, log_length=200_000)
    chance = random.Random(0)
    ends = processes.Event()

    def steady(store: SharedMemoryStore) -> int:
        number = 0
        while not ends.is_set():
            number += 1
            for index in range(len(store.shards)):
                store.push(index, push_of(0, number, rule))
            store.finish_step(5)
        return number

    def victim(store: SharedMemoryStore) -> None:
        number = max(store.last_pushes())  # what was not acknowledged is pushed again under a new number
        while True:
            number += 1
            for index in range(len(store.shards)):
                store.push(index, push_of(1, number, rule))
            store.finish_step(5)

    world.start(0, steady, meets=False)
    _, shards = make_arrays(world.shape, memoryview(world.memory))
    for _ in range(rounds):
        before = int(shards[0].contents.numbers[1])
        process = world.start(1, victim, meets=False)
        deadline = time.monotonic() + 60
        while shards[0].contents.numbers[1] == before:
            assert time.monotonic() < deadline, "it does not push"
            time.sleep(0.0005)
        time.sleep(0.005 * chance.random())
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    ends.set()
    (pushed,) = world.collect(1)
    store = world.store(0, meets=False)
    logs = [store.log(index) for index in range(len(store.shards))]
    for log in logs:
        own = [number for worker, number in log if worker == 0]
        theirs = [number for worker, number in log if worker == 1]
        assert own == list(range(1, pushed + 1)), "every acknowledged push, once, and in order"
        assert len(set(theirs)) == len(theirs), "none twice"
        assert theirs == sorted(theirs)
    assert sum(worker == 1 for worker, _ in logs[0]) >= rounds
    applied = [{number for worker, number in log if worker == 1} for log in logs]
    assert set.union(*applied) - set.intersection(*applied), "it was killed in the middle of pushes, not between them"
    assert np.array_equal(values_of(store), replayed(world, rule, logs)), "no torn shard"


def test_the_memory_is_as_large_as_its_arrays() -> None:
    world = World(3, ("mean", "mean_of_squares"), together=True, log_length=4)
    try:
        held = sum(3 * shard.nbytes + 3 * shard.nbytes for shard in world.shards)
        journals = 3 * 3 * world.partition
        notes = 3 * 20_000
        assert held <= world.shape.nbytes <= held + journals + notes + 1000 * len(world.shards)
    finally:
        world.close()


def test_contents_can_be_filled_and_read_again(make_world: Callable[..., World]) -> None:
    store = make_world(1, ("momentum",)).store(0, meets=False)

    def write(shard: StoreShard, contents: Contents) -> None:
        contents.values[:] = np.arange(shard.begin, shard.begin + shard.count)
        contents.slots[0][:] = shard.begin
        contents.counts[:] = 7

    store.fill(write)
    assert np.array_equal(values_of(store), np.arange(COUNT))
    found: list[tuple[float, list[int]]] = []
    store.contents(1, lambda contents: found.append((contents.slots[0][0], contents.counts.tolist())))
    assert found[0][0] == store.shards[1].begin
    assert set(found[0][1]) == {7}
