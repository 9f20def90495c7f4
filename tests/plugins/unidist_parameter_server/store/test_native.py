"""Calls of C code over all shards do what pushes to single shards do, also when a worker is killed in the middle."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from unidist.buffer import DType
from unidist_parameter_server.native import IS_BUILT
from unidist_parameter_server.optimizers import Adam, Momentum, Rule
from unidist_parameter_server.store import ProcessLocks, Push, SharedMemoryStore
from unidist_parameter_server.store.flat import FlatChange, FlatTargets
from unidist_parameter_server.store.memory import StoreShape, make_arrays
from unidist_parameter_server.store.shards import FlatMemory, ParameterSlot, cut

pytestmark = [pytest.mark.parallel, pytest.mark.skipif(not IS_BUILT, reason="built without a C compiler")]

Array = np.ndarray[Any, Any]
COUNTS = (700, 5, 1600, 64)
MEMORIES = [
    FlatMemory(DType.FLOAT64, 720, (ParameterSlot(0, 0, 700), ParameterSlot(1, 704, 5))),
    FlatMemory(DType.FLOAT32, 1664, (ParameterSlot(3, 0, 64), ParameterSlot(2, 64, 1600))),
]
TYPES = ("float64", "float64", "float32", "float32")
SHARDS = cut(MEMORIES, 4096)  # of more than one block
LARGE = [FlatMemory(DType.FLOAT64, 40_000, (ParameterSlot(0, 0, 40_000),))]
RULES: list[Rule] = [Adam(0.01), Adam(0.02, weight_decay=0.1, decoupled=True), Momentum(0.1, momentum=0.9), Adam(0.01)]
processes = multiprocessing.get_context("fork")


class World:
    """A store of some workers, in this process and in forked ones.

    Args:
        num_workers: number of workers.
        together: gradients are applied together.
        log_length: see `StoreShape`.
        shares_gradients: they are in memory that all workers map.
        memories: of the parameters.
        partition: bytes of a shard.
    """

    def __init__(
        self,
        num_workers: int = 2,
        *,
        together: bool = False,
        log_length: int = 0,
        shares_gradients: bool = True,
        memories: Sequence[FlatMemory] = MEMORIES,
        partition: int = 4096,
    ) -> None:
        collects = together and not shares_gradients
        self.memories = memories
        shards = cut(memories, partition)
        self.shape = StoreShape(shards, 2, num_workers, len(COUNTS), collects, log_length)
        self.memory = mmap.mmap(-1, self.shape.nbytes)
        self.gradients = [
            [np.frombuffer(mmap.mmap(-1, each.count * each.dtype.itemsize), each.dtype.value) for each in memories]
            for _ in range(num_workers)
        ]
        self.shares_gradients = shares_gradients
        self.needed = num_workers
        self.barrier = processes.Barrier(num_workers)
        descriptor, self.path = tempfile.mkstemp()
        os.close(descriptor)

    def store(self, worker: int = 0, *, meets: bool = False) -> SharedMemoryStore:
        """Return the store of a worker, in its process; meets: when all workers have theirs."""
        return SharedMemoryStore(
            self.shape,
            ("mean", "mean_of_squares"),
            memoryview(self.memory),
            ProcessLocks(self.path),
            worker,
            needed=self.needed,
            barrier=(lambda: self.barrier.wait(60)) if meets else lambda: None,
            timeout=timedelta(seconds=60),
            inboxes=self.gradients if self.shares_gradients else (),
        )

    def push(self, worker: int, number: int, *, seed: int | None = None, **others: Any) -> Push:
        """Return a push of all parameters, whose gradients are known from who pushes it and when."""
        values = gradient(worker, number if seed is None else seed, self.memories)
        for array, own in zip(self.gradients[worker], values, strict=True):
            array[:] = own
        present = others.pop("present", [True] * len(COUNTS))
        return Push(number, FlatChange(self.gradients[worker]), RULES, present, **others)

    def close(self) -> None:
        """Remove the file for locks."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    """Return a list to which tests add worlds, which are closed at the end."""
    made: list[World] = []
    yield made
    for world in made:
        world.close()


def gradient(worker: int, number: int, memories: Sequence[FlatMemory] = MEMORIES) -> list[Array]:
    """Return the gradients of a push."""
    chance = np.random.default_rng((worker, number))
    return [chance.standard_normal(each.count).astype(each.dtype.value) for each in memories]


def pushed_one_by_one(store: SharedMemoryStore, push: Push) -> None:
    """Push to single shards, through Python."""
    change = push.change
    by_shard = Push(**{**vars(push), "change": lambda shard: change(shard).copy()})
    for index in range(len(SHARDS)):
        store.push(index, by_shard)


def everything(store: SharedMemoryStore) -> list[Array]:
    """Return copies of all that the store has of the shards."""
    found: list[Array] = []
    for index in range(len(store.shards)):
        store.contents(
            index,
            lambda contents: found.extend(
                np.array(each) for each in (contents.values, *contents.slots, contents.counts)
            ),
        )
    return found


def same(first: Sequence[Array], second: Sequence[Array]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("shares", [True, False])
def test_pushes_to_all_shards_are_those_to_single_ones(worlds: list[World], shares: bool) -> None:
    worlds += [World(shares_gradients=shares), World()]
    store, other = (world.store() for world in worlds)
    targets = [np.zeros(count, dtype) for count, dtype in zip(COUNTS, TYPES, strict=True)]
    receiver = FlatTargets(SHARDS, targets)
    order = list(range(len(SHARDS)))[::-1]
    for number in range(1, 7):
        present = [True, number % 2 == 0, number > 2, True]
        versions = [max(0, number - 3)] * len(SHARDS)
        factors = {"factor": 0.5, "read_versions": versions, "present": present}
        applied = store.push_all(order, worlds[0].push(0, number, **factors), receiver)
        assert applied == dict.fromkeys(order, number)
        pushed_one_by_one(other, worlds[1].push(0, number, **factors))
        assert same(everything(store), everything(other))
        again = [np.zeros(count, dtype) for count, dtype in zip(COUNTS, TYPES, strict=True)]
        assert store.read_all(order, FlatTargets(SHARDS, again)) == applied
        assert same(targets, again), "what a push copies out is what is fetched"
    assert all(np.abs(target).max() > 0 for target in targets)
    assert store.push_all(order, worlds[0].push(0, 6), receiver) == applied, "none is applied twice"


def test_synchronous_steps_are_those_of_the_mean(worlds: list[World]) -> None:
    worlds += [World(2, together=True), World(1)]
    both, alone = worlds
    alone_store = alone.store()

    def work(worker: int, results: Any) -> None:
        store = both.store(worker, meets=True)
        targets = [np.zeros(count, dtype) for count, dtype in zip(COUNTS, TYPES, strict=True)]
        receiver = FlatTargets(SHARDS, targets)
        store.read_all(range(len(SHARDS)), receiver)
        for number in range(1, 5):
            assert store.push_together(both.push(worker, number), number - 1, waits=True)
            assert set(store.read_all(range(len(SHARDS)), receiver).values()) == {number}
        plain = [np.zeros(count, dtype) for count, dtype in zip(COUNTS, TYPES, strict=True)]
        store.read_all(range(len(SHARDS)), FlatTargets(SHARDS, plain))
        results.put((same(targets, plain), everything(store)))

    results = processes.Queue()
    workers = [processes.Process(target=work, args=(worker, results), daemon=True) for worker in range(2)]
    for process in workers:
        process.start()
    found = [results.get(timeout=60) for _ in workers]
    for process in workers:
        process.join(60)
    for number in range(1, 5):
        push = alone.push(0, number)
        for mean, first, second in zip(alone.gradients[0], gradient(0, number), gradient(1, number), strict=True):
            mean[:] = (first + second) * mean.dtype.type(0.5)
        pushed_one_by_one(alone_store, push)
    for are_same, contents in found:
        assert are_same, "what a step copies out is what is fetched"
        assert same(contents, everything(alone_store))


def test_shards_that_another_process_uses_come_last(worlds: list[World]) -> None:
    worlds.append(World())
    (world,) = worlds
    held, release = processes.Event(), processes.Event()

    def hold() -> None:
        with open(world.path, "r+b") as file:
            for index in (0, 2):
                fcntl.lockf(file, fcntl.LOCK_EX, 1, index)
            held.set()
            release.wait(60)

    holder = processes.Process(target=hold, daemon=True)
    holder.start()
    assert held.wait(60)
    store = world.store()
    timer = threading.Timer(0.2, release.set)
    timer.start()
    assert store.push_all(range(len(SHARDS)), world.push(0, 1)) == dict.fromkeys(range(len(SHARDS)), 1)
    assert release.is_set()
    holder.join(60)
    timer.join()


def test_a_worker_that_is_killed_leaves_no_torn_shard(worlds: list[World]) -> None:
    """One worker pushes throughout, another is killed while it pushes, and comes back, many times."""
    rounds = 40
    worlds += [World(2, log_length=200_000), World(1)]
    world, alone = worlds
    ends, pushed = processes.Event(), processes.Value("q", 0)
    order = range(len(SHARDS))

    def steady() -> None:
        store = world.store(0)
        while not ends.is_set():
            pushed.value += 1
            store.push_all(order, world.push(0, pushed.value, seed=pushed.value % 50))

    def victim() -> None:
        store = world.store(1)
        number = max(store.last_pushes())  # what was not acknowledged is pushed again under a new number
        while True:
            number += 1
            store.push_all(order, world.push(1, number, seed=number % 50))

    _, shards = make_arrays(world.shape, memoryview(world.memory))
    chance = random.Random(0)
    steady_process = processes.Process(target=steady, daemon=True)
    steady_process.start()
    for _ in range(rounds):
        before = int(shards[0].contents.numbers[1])
        process = processes.Process(target=victim, daemon=True)
        process.start()
        deadline = time.monotonic() + 60
        while shards[0].contents.numbers[1] == before:
            assert time.monotonic() < deadline, "it does not push"
            time.sleep(0.0005)
        time.sleep(0.003 * chance.random())
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    ends.set()
    steady_process.join(60)
    store = world.store(0)
    contents = everything(store)
    logs = [store.log(index) for index in order]
    for log in logs:
        own = [number for worker, number in log if worker == 0]
        theirs = [number for worker, number in log if worker == 1]
        assert own == list(range(1, pushed.value + 1)), "every push once, and in order"
        assert theirs == sorted(set(theirs)), "none twice"
    alone_store = alone.store()
    gradients = {(worker, seed): gradient(worker, seed) for worker in range(2) for seed in range(50)}
    for index, log in enumerate(logs):
        for number, (worker, theirs) in enumerate(log, start=1):
            push = Push(number, FlatChange(gradients[worker, theirs % 50]), RULES, [True] * len(COUNTS))
            alone_store.push_all([index], push)
    assert same(contents, everything(alone_store)), "no torn shard"


@pytest.mark.parametrize("shares", [True, False])
def test_a_shard_that_a_killed_worker_was_changing_is_finished_or_restored(worlds: list[World], shares: bool) -> None:
    """With gradients in shared memory somebody else finishes the push to the shard, else it is undone."""
    worlds += [
        World(2, shares_gradients=shares, memories=LARGE, partition=200_000),
        World(1, memories=LARGE, partition=200_000),
    ]
    world, alone = worlds
    _, shards = make_arrays(world.shape, memoryview(world.memory))
    order = list(range(len(shards)))
    gradients = gradient(1, 1, LARGE)

    def victim() -> None:
        store = world.store(1)
        push = world.push(1, max(store.last_pushes()), seed=1)
        while True:  # most of the time in the middle of a shard
            push = Push(push.number + 1, push.change, RULES, push.present)
            store.push_all(order, push)

    chance = random.Random(0)
    num_interrupted = 0
    store, alone_store = world.store(0), alone.store()
    reached = [0] * len(shards)
    for _ in range(40):
        before = shards[-1].version
        process = processes.Process(target=victim, daemon=True)
        process.start()
        deadline = time.monotonic() + 60
        while shards[-1].version == before:
            assert time.monotonic() < deadline, "it does not push"
        time.sleep(0.002 * chance.random())
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        interrupted = [index for index in order if shards[index].is_interrupted]
        versions = [shard.version for shard in shards]
        num_interrupted += len(interrupted)
        contents = everything(store)
        assert [shard.version - version for shard, version in zip(shards, versions, strict=True)] == [
            int(shares and index in interrupted) for index in order
        ]
        for index, shard in enumerate(shards):
            for number in range(reached[index] + 1, shard.version + 1):
                alone_store.push_all([index], Push(number, FlatChange(gradients), RULES, [True] * len(COUNTS)))
            reached[index] = shard.version
        assert same(contents, everything(alone_store))
    assert num_interrupted > 5
