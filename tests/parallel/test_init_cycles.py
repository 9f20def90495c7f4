"""init and shutdown, again and again in one process, cost little and leave nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest

from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.parallel

_CYCLES = 100


def _cycles(number: int) -> dict[str, Any]:
    """Run on a rank: cycles of init, one operation and shutdown; what is held before and after."""
    import os

    from unidist.buffer import Buffer
    from unidist.runtime import context
    from unidist.testing import Resources, leaked_since

    def native() -> int:
        with open("/proc/self/maps") as file:
            maps = file.readlines()
        if any("libasan" in line for line in maps):  # which keeps what was freed, so its own memory grows
            maps = [line for line in maps if "/" in line]
        return len(os.listdir("/proc/self/task")) + len(maps)

    def cycle() -> None:
        runtime = context.init()
        data = Buffer.of(bytearray([runtime.topology.rank + 1]))
        runtime.world.allreduce(data, data).wait()
        assert data.bytes()[0] == sum(range(1, runtime.topology.world_size + 1))
        context.shutdown()
        assert not context.is_initialized()

    for _ in range(3):  # what is imported and cached once
        cycle()
    before, native_before = Resources.held(), native()
    begin = time.monotonic()
    for _ in range(number):
        cycle()
    seconds = time.monotonic() - begin
    return {"seconds": seconds, "leaks": leaked_since(before), "native": native() - native_before}


def test_a_hundred_cycles_are_quick_and_leave_nothing(rank_pool: RankPoolFactory) -> None:
    for outcome in rank_pool(2).run(_cycles, (_CYCLES,)):
        assert outcome["leaks"] == []
        assert outcome["native"] < _CYCLES // 10, "threads or mappings of libraries pile up"
        assert outcome["seconds"] < 60  # on a machine with nothing else to do, 2


def test_cycles_of_a_single_process_leave_nothing(rank_pool: RankPoolFactory) -> None:
    (outcome,) = rank_pool(1).run(_cycles, (_CYCLES,))
    assert outcome["leaks"] == []
    assert outcome["native"] < _CYCLES // 10
    assert outcome["seconds"] < 60


def test_init_again_without_shutdown_is_the_same_context_and_shutdown_twice_is_nothing(
    rank_pool: RankPoolFactory,
) -> None:
    def twice() -> bool:
        from unidist.runtime import context

        first, second = context.init(), context.init()
        context.shutdown()
        context.shutdown()
        return first is second

    assert rank_pool(2).run(twice) == [True, True]


def test_engine_memory_outlives_shutdown(rank_pool: RankPoolFactory) -> None:
    def keep() -> bytes:
        from unidist.runtime import context

        memory = context.init().world.allocate(4096)
        memory.bytes()[:4] = b"kept"
        context.shutdown()
        context.init()
        context.shutdown()
        return bytes(memory.bytes()[:4])

    assert rank_pool(2).run(keep) == [b"kept", b"kept"]
