"""A store on real servers, with processes as workers and no framework."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from parameter_servers import COUNT, Array, RemoteWorld, gradient, push_of, values_of

from unidist.errors import PeerLostError, StalledError
from unidist_parameter_server.client import RemoteStore
from unidist_parameter_server.optimizers import Adam, AddDifference, Momentum
from unidist_parameter_server.store import Contents
from unidist_parameter_server.store.shards import StoreShard

pytestmark = pytest.mark.parallel
MakeWorld = Callable[..., RemoteWorld]


@pytest.fixture
def make_world() -> Iterator[MakeWorld]:
    """Return a function that makes worlds, which end with the test."""
    made: list[RemoteWorld] = []

    def make(*args: Any, **kwargs: Any) -> RemoteWorld:
        made.append(RemoteWorld(*args, **kwargs))
        return made[-1]

    yield make
    for world in made:
        world.close()


def all_of(store: RemoteStore) -> range:
    return range(len(store.shards))


def test_a_push_is_applied_once(make_world: MakeWorld) -> None:
    store = make_world(1, 2, slots=("mean", "mean_of_squares")).store(0, meets=False)
    for _ in range(3):
        assert set(store.push_all(all_of(store), push_of(0, 1, Adam(0.1))).values()) == {1}
    first = values_of(store)
    assert np.abs(first).max() > 0.05
    assert set(store.push_all(all_of(store), push_of(0, 2, Adam(0.1))).values()) == {2}
    assert not np.array_equal(values_of(store), first)
    store.leave()


def test_contents_can_be_filled_and_read_again(make_world: MakeWorld) -> None:
    store = make_world(1, 3, slots=("momentum",)).store(0, meets=False)

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
    store.leave()


@pytest.mark.parametrize(("num_servers", "replicas"), [(1, 0), (3, 0), (2, 1)])
def test_the_final_values_are_those_of_all_pushes(make_world: MakeWorld, num_servers: int, replicas: int) -> None:
    world = make_world(3, num_servers, replicas=replicas, log_length=200)

    def work(store: RemoteStore) -> tuple[Array, Any]:
        for number in range(1, 21):
            store.push_all(all_of(store), push_of(store.worker, number, AddDifference(), whole=True))
            store.finish_step(None)
        world.barrier.wait(60)
        return values_of(store), store.log()

    outcomes = world.run(work)
    values, (logs, clocks) = outcomes[0]
    assert clocks == [20] * 3
    for log in logs:
        assert sorted(log) == [(worker, number) for worker in range(3) for number in range(1, 21)]
        assert [number for worker, number in log if worker == 1] == list(range(1, 21)), "each worker's in order"
    assert all(np.array_equal(values, other) for other, _ in outcomes)
    pushed = sum(np.round(gradient(worker, number) * 1000) for worker in range(3) for number in range(1, 21))
    assert np.array_equal(values, pushed)


@pytest.mark.parametrize("num_servers", [1, 3])
def test_a_synchronous_step_applies_the_mean(make_world: MakeWorld, num_servers: int) -> None:
    world = make_world(3, num_servers, slots=("momentum",), together=True)

    def work(store: RemoteStore) -> Array:
        for number in range(1, 11):
            assert store.push_together(push_of(store.worker, number, Momentum(0.01, momentum=0.9)), 0, waits=True)
            assert store.version == number
        return values_of(store)

    outcomes = world.run(work)
    assert all(np.array_equal(outcomes[0], other) for other in outcomes)
    values, momentum = np.zeros(COUNT), np.zeros(COUNT)
    for number in range(1, 11):
        momentum = 0.9 * momentum + sum(gradient(worker, number) for worker in range(3)) / 3
        values -= 0.01 * momentum
    assert np.abs(outcomes[0] - values).max() < 1e-13


def test_with_backup_workers_the_first_gradients_count(make_world: MakeWorld) -> None:
    world = make_world(3, together=True, backup=1)

    def work(store: RemoteStore) -> tuple[bool, Array]:
        if store.worker == 1:
            deadline = time.monotonic() + 60
            while store.log()[0][0] == [] and store.read_all([0], lambda _: lambda values: None)[0] < 1:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            store._links[0].step = 0  # it has computed with what it read before
        counts = store.push_together(push_of(store.worker, 1, Momentum(1.0)), 0, waits=True)
        return counts, values_of(store)

    outcomes = world.run(work)
    assert [counts for counts, _ in outcomes] == [True, False, True]
    for _, values in outcomes:
        assert np.allclose(values, -(gradient(0, 1) + gradient(2, 1)) / 2, rtol=0, atol=1e-15)


def test_a_fast_worker_is_at_most_the_bound_ahead_of_a_slow_one(make_world: MakeWorld) -> None:
    world = make_world(2)

    def work(store: RemoteStore) -> list[int]:
        ahead = []
        for _ in range(20):
            deadline = time.monotonic() + 60
            while store.worker == 1 and (now := store.log()[1])[0] < min(now[1] + 4, 20):  # until the other is held
                assert time.monotonic() < deadline
                time.sleep(0.001)
            store.finish_step(3)
            _, clocks = store.log()
            ahead.append(clocks[store.worker] - clocks[1 - store.worker])
        return ahead

    fast, slow = world.run(work)
    assert max(fast) == 3, "it is held there, and gets there"
    assert max(slow) <= 3


def test_who_is_lost_is_not_waited_for_under_a_bound(make_world: MakeWorld) -> None:
    world = make_world(2)

    def work(store: RemoteStore) -> int:
        if store.worker == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(10):
            store.finish_step(2)
        return store.log()[1][0]

    for worker in range(2):
        world.start(worker, work)
    assert world.collect(1) == [10]


def test_a_synchronous_step_says_who_was_lost(make_world: MakeWorld) -> None:
    world = make_world(2, together=True)

    def work(store: RemoteStore) -> None:
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
def test_who_waits_too_long_says_for_whom(make_world: MakeWorld, together: bool) -> None:
    world = make_world(2, together=together, timeout=timedelta(seconds=0.5))

    def work(store: RemoteStore) -> None:
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
    assert "waited in vain for worker 1, which it" in str(error)
    assert "worker 1 has made 0 steps, the last" in str(error)


def test_a_lost_server_is_an_error_that_says_how_much_is_lost(make_world: MakeWorld) -> None:
    world = make_world(1, 2)
    store = world.store(0, meets=False)
    for number in (1, 2, 3):
        store.push_all(all_of(store), push_of(0, number, Momentum(1.0)))
        if number == 1:
            store.saved()
    begun = world.kill(1)
    with pytest.raises(PeerLostError, match=r"server 1 at .*: 2 updates since the last checkpoint\. .*replicas=1"):
        store.push_all(all_of(store), push_of(0, 4, Momentum(1.0)))
    assert time.monotonic() - begun < 30  # nobody waits until a silent server counts as lost
    store.leave()


@pytest.mark.parametrize("together", [False, True])
def test_a_replica_goes_on_and_no_push_is_lost_or_applied_twice(make_world: MakeWorld, together: bool) -> None:
    world = make_world(2, 2, replicas=1, together=together, log_length=1000)
    rounds, kill_at = 200, 60
    rule = Momentum(1.0) if together else AddDifference()

    def work(store: RemoteStore) -> tuple[Array, Any, float]:
        longest = 0.0
        for number in range(1, rounds + 1):
            begun = time.monotonic()
            push = push_of(store.worker, number, rule, whole=True)
            if together:
                store.push_together(push, 0, waits=True)
            else:
                store.push_all(all_of(store), push)
                store.finish_step(5)
            longest = max(longest, time.monotonic() - begun)
            if store.worker == 0 and number == kill_at:
                world.programs[1].kill()
        world.barrier.wait(60)
        return values_of(store), store.log(), longest

    outcomes = world.run(work)
    values, (logs, _), longest = outcomes[0]
    for log in logs:
        assert sorted(log) == [(worker, number) for worker in range(2) for number in range(1, rounds + 1)]
    pushed = sum(np.round(gradient(worker, number) * 1000) for worker in range(2) for number in range(1, rounds + 1))
    expected = -pushed / 2 if together else pushed
    assert np.array_equal(values, expected)
    assert np.array_equal(outcomes[1][0], expected)
    assert longest < 30


def test_the_primary_goes_on_alone_when_its_replica_is_lost(make_world: MakeWorld) -> None:
    world = make_world(1, 2, replicas=1)
    store = world.store(0, meets=False)
    part = store._parts[0]
    for number in range(1, 20):
        if number == 10:
            world.kill(1)
        store.push_all(part, push_of(0, number, AddDifference(), whole=True))
    pushed = sum(np.round(gradient(0, number) * 1000) for number in range(1, 20))
    begin, end = store.shards[part.start].begin, store.shards[part.stop - 1].begin + store.shards[part.stop - 1].count
    assert np.array_equal(values_of(store)[begin:end], pushed[begin:end])
    store.leave()


def test_workers_with_different_models_are_refused(make_world: MakeWorld) -> None:
    world = make_world(2)
    first = world.store(0, meets=False)
    world.shape = type(world.shape)(world.shards, 1, 2, 2, False)
    with pytest.raises(ValueError, match="the ranks have different models, or options"):
        world.store(1, meets=False)
    first.leave()


def test_a_server_with_too_little_memory_says_how_much_it_needs(make_world: MakeWorld) -> None:
    world = make_world(1)
    huge = StoreShard(0, world.shards[0].dtype, 0, 1 << 44, ())
    world.shape = type(world.shape)([huge], 2, 1, 2, False)
    with pytest.raises(Exception, match=r"server 0 on host .* needs 3\.932e\+05 GiB for its part"):
        world.store(0, meets=False)
