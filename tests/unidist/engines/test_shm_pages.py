"""Memory that ranks share goes when the last of them lets go of it, in whatever order they do."""

from __future__ import annotations

import os

import pytest

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("unidist.engines._shm")

NBYTES = 8 << 20


@pytest.mark.parallel
def test_shared_memory_is_given_back_when_all_have_let_go(rank_pool: RankPoolFactory) -> None:
    def share() -> list[float]:
        """Return how many megabytes rank 0's arena has at four moments."""
        import gc

        from unidist.communicator_capabilities import SharesMemory
        from unidist.runtime import context

        runtime = context.init()
        try:
            world = runtime.new_communicator("data")
            assert isinstance(world, SharesMemory)
            arena = runtime.world._shared.host.arena  # type: ignore[attr-defined]  # the shm engine's

            def used() -> float:
                world.allocate(1)  # looks for what all have let go of
                found = os.fstat(arena.fd).st_blocks * 512 / NBYTES
                world.barrier().wait()  # no rank goes on before all have looked
                return found

            found = [used()]
            memory = world.allocate_shared(NBYTES)
            buffer = memory.shared
            buffer.bytes()[world.rank] = 7
            world.barrier().wait()
            found.append(used())
            del memory
            if world.rank == 0:
                del buffer
                gc.collect()
            world.barrier().wait()
            found.append(used())
            if world.rank == 1:
                assert buffer.bytes()[:2] == b"\7\7", "rank 0 has let go of it, this rank has not"
                del buffer
                gc.collect()
            world.barrier().wait()
            found.append(used())
        finally:
            context.shutdown()
        return found

    before, shared, held, after = rank_pool(2).run(share)[0]
    assert shared - before == pytest.approx(1, abs=0.01)
    assert held == shared
    assert after == before


@pytest.mark.parallel
def test_shared_memory_outlives_the_runtime_and_the_rank_in_whose_memory_it_lies(rank_pool: RankPoolFactory) -> None:
    def share() -> bool:
        import gc

        from unidist.runtime import context

        context.init()
        world = context.current().new_communicator("data")
        view = world.allocate_shared(NBYTES).view  # type: ignore[attr-defined]  # the shm engine's
        view.bytes()[world.rank] = 5
        if world.rank == 0:
            view = None
        world.barrier().wait()
        context.shutdown()
        gc.collect()
        context.init()  # rank 0's memory would be used again
        context.current().new_communicator("data").barrier().wait()
        context.shutdown()
        return view is None or view.bytes()[:2] == b"\0\5"

    assert rank_pool(2).run(share) == [True, True]


@pytest.mark.parallel
def test_a_group_in_a_reference_cycle_may_be_the_last_to_know_the_memory(rank_pool: RankPoolFactory) -> None:
    def forget() -> bool:
        """Collect a group that was not closed together with the arena: in a cycle finalizers run in any order."""
        import gc

        from unidist.runtime import context

        runtime = context.init()
        world = runtime.new_communicator("data")
        part = world.split(range(world.size))
        assert part is not None
        part.barrier().wait()
        part.itself = part  # type: ignore[attr-defined]
        world.close()
        context.shutdown()
        del runtime, world, part
        return gc.collect() > 0

    assert rank_pool(2).run(forget) == [True, True]
