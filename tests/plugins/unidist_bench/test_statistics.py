from __future__ import annotations

import pytest

from unidist_bench.collectives import Collective
from unidist_bench.statistics import Figures, bus_factor, percentile


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        (Collective.ALLREDUCE, 1.5),
        (Collective.ALLGATHER, 0.75),
        (Collective.REDUCESCATTER, 0.75),
        (Collective.ALLTOALL, 0.75),
        (Collective.BROADCAST, 1.0),
        (Collective.SENDRECV, 1.0),
        (Collective.BARRIER, 0.0),
    ],
)
def test_bus_factors_are_those_of_nccl_tests_with_4_ranks(collective: Collective, factor: float) -> None:
    assert bus_factor(collective, 4) == factor


def test_the_99th_percentile_is_the_value_that_99_of_100_do_not_exceed() -> None:
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile(range(1, 1001), 0.99) == 990
    assert percentile([3, 1, 2], 0.99) == 3
    assert percentile([7], 0.99) == 7


def test_bandwidths_follow_from_the_median() -> None:
    figures = Figures.of([1.0, 0.25, 0.5])
    assert (figures.min, figures.median, figures.p99) == (0.25, 0.5, 1.0)
    assert figures.algorithm_bandwidth(1000) == 2000
    assert figures.bus_bandwidth(1000, Collective.ALLREDUCE, 4) == 3000
