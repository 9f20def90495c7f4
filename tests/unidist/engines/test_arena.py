"""Engine memory ends with its last user, also where Python's collector sees no reason to look."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from unidist.testing.fixtures import RankPoolFactory

_arena = pytest.importorskip("unidist.engines._arena")


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Python collects no garbage unless it is asked to."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.mark.usefixtures("no_collection")
def test_arenas_in_reference_cycles_do_not_pile_up() -> None:
    made: list[weakref.ref[Any]] = []
    for _ in range(3 * _arena._MANY):
        cycle: list[object] = [_arena.Arena(1 << 20).allocate(1 << 16)]
        cycle.append(cycle)
        made.append(weakref.ref(cycle[0]._arena))  # type: ignore[attr-defined]
        del cycle
    assert sum(arena() is not None for arena in made) <= _arena._MANY


@pytest.mark.usefixtures("no_collection")
def test_arenas_that_are_in_use_stay() -> None:
    kept = [_arena.Arena(1 << 20).allocate(4096) for _ in range(2 * _arena._MANY)]
    for number, allocation in enumerate(kept):
        allocation.buffer().bytes()[0] = number
    assert [allocation.buffer().bytes()[0] for allocation in kept] == list(range(len(kept)))


@pytest.mark.usefixtures("no_collection")
def test_those_in_use_cost_a_collection_only_when_they_have_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_arena, "_collect_at", _arena._MANY)
    collections: list[object] = []
    monkeypatch.setattr(_arena.gc, "collect", lambda: collections.append(None))
    kept = [_arena.Arena(1 << 20) for _ in range(16 * _arena._MANY)]
    assert len(kept) == 16 * _arena._MANY
    assert 3 <= len(collections) <= 5


def test_memory_may_be_collected_in_the_middle_of_an_allocation() -> None:
    arena = _arena.Arena(1 << 24)

    def allocate() -> None:
        for _ in range(1000):
            cycle: list[object] = [arena.allocate(4096)]
            cycle.append(cycle)

    # Each thread leaves garbage that another one collects, at any container that it makes.
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(1)
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=allocate, daemon=True) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "allocate waits for a lock that its own thread holds"
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
    gc.collect()
    assert arena.allocate(arena.capacity).offset == 0  # nothing was lost


@pytest.mark.parallel
def test_nothing_of_a_runtime_that_has_ended_holds_engine_memory(rank_pool: RankPoolFactory) -> None:
    def end() -> tuple[int, int]:
        import gc

        from unidist.buffer import Buffer, DType
        from unidist.communicator import ReduceOp
        from unidist.negotiation import OperationKind, Request
        from unidist.runtime import context
        from unidist.testing import Resources

        gc.collect()
        gc.disable()
        try:
            runtime = context.init()
            world, rank = runtime.world, runtime.topology.rank
            small, large = Buffer.allocate(8, DType.UINT8), world.allocate(1 << 20)
            works = [
                world.allreduce(large, large),
                world.send(small, to=1 - rank),
                world.recv(Buffer.allocate(8, DType.UINT8), source=1 - rank),
            ]
            for work in works:
                work.wait()
            request = Request("a", OperationKind.ALLREDUCE, small, small, (8,), ReduceOp.SUM)
            handle = runtime.negotiator.submit(request)
            handle.wait()
            del large
            with_runtime = len(Resources.held().mappings)
            context.shutdown()
            # All that a script may still have in its hands: none of it holds memory.
            still_there = (runtime, world, works, handle, request)
            assert all(item is not None for item in still_there)
            return with_runtime, len(Resources.held().mappings)
        finally:
            gc.enable()

    for with_runtime, afterwards in rank_pool(2, engine="shm").run(end):
        assert with_runtime == 2, "this rank's memory and its peer's"
        assert afterwards == 0


def test_space_that_was_given_back_is_one_again() -> None:
    page = _arena._PAGE
    arena = _arena.Arena(3 * page)
    kept = [arena.allocate(page) for _ in range(3)]
    del kept
    assert arena.allocate(3 * page).nbytes == 3 * page
