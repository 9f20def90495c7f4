"""Real measurements by real ranks; what they find is not judged, only that it hangs together."""

from __future__ import annotations

import pytest

from unidist.errors import RemoteError, UsageError
from unidist.testing.fixtures import RankPoolFactory
from unidist_planner.step_time import benchmark as measuring
from unidist_planner.step_time.benchmark import MESSAGE_BYTES, RankFigures, measure


def quickly() -> RankFigures:
    """Measure a few sizes, briefly."""
    measuring._ARITHMETIC_SEC = 0.02
    measuring._MOST = 20
    return measure()


@pytest.mark.parallel
def test_ranks_time_arithmetic_memory_and_messages_together(rank_pool: RankPoolFactory) -> None:
    first, second = rank_pool(2, engine="shm").run(quickly)
    for found in (first, second):
        assert found.flops > 1e8
        assert found.memory_bandwidth > 1e7
        assert [size for size, _ in found.allreduces] == list(MESSAGE_BYTES)
        assert all(seconds > 0 for _, seconds in found.allreduces)
        assert [size for size, _ in found.messages] == list(MESSAGE_BYTES)
        # 16 MiB take longer than 8 bytes, whatever else the machine does
        assert found.messages[-1][1] > found.messages[0][1]
    assert first.allreduces == second.allreduces  # of the slowest rank, alike on both
    assert first.engine.startswith("shm")


@pytest.mark.parallel
def test_one_rank_has_nobody_to_exchange_with(rank_pool: RankPoolFactory) -> None:
    with pytest.raises(RemoteError, match="2 or more") as caught:
        rank_pool(1).run(quickly)
    assert isinstance(caught.value.__cause__, UsageError)
