"""Links from files of `unidist bench`: a ring over them takes as long as was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planning_plugins import A100

from unidist.cost_model.cluster import Group
from unidist.cost_model.collectives import Link, cost
from unidist.cost_model.step import Operation
from unidist.errors import ConfigurationError
from unidist_bench import Figures, Results, Row, Series
from unidist_bench.collectives import Collective
from unidist_bench.results import as_json
from unidist_planner.step_time.bench_links import bench_links

SIZES = (8, 1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27)


def reached(size: int) -> float:
    """A link of 10 GB/s of which small messages get less."""
    return 0.3 if size <= 1 << 16 else 0.6 if size <= 1 << 20 else 0.9


def write(
    path: Path, hosts: tuple[str, ...], collective: Collective = Collective.ALLREDUCE, latency: float = 2e-5
) -> Path:
    operation: Operation = "allgather" if collective is Collective.ALLGATHER else "allreduce"
    ring = cost(operation, "ring", len(hosts))
    seconds = {size: ring.latencies * latency + size * ring.moves / (10e9 * reached(size)) for size in SIZES}
    rows = [Row(size, size // 4, {"unidist": Figures(*[max(time, 1e-9)] * 3)}) for size, time in seconds.items()]
    series = [Series(collective, "float32", "sum", False, rows)]
    path.write_text(as_json(Results("1", "2026-01-01", "tcp", "engine", hosts, {}, series)))
    return path


@pytest.mark.parametrize("hosts", [("a",) * 4, ("a", "b", "c", "d"), ("a", "a", "b", "b")])
def test_a_ring_over_the_link_takes_as_long_as_was_measured(tmp_path: Path, hosts: tuple[str, ...]) -> None:
    found = bench_links(write(tmp_path / "bench.json", hosts))
    assert found.is_inside is (len(set(hosts)) == 1)
    assert found.link.latency == pytest.approx(2e-5, rel=0.1)
    assert found.link.bandwidth == pytest.approx(9e9, rel=0.02)
    ring = cost("allreduce", "ring", 4)
    for size in (1 << 20, 1 << 24, 1 << 27):
        slower = Link(found.link.latency, found.link.bandwidth * found.efficiency.at(size))
        measured = ring.latencies * 2e-5 + size * ring.moves / (10e9 * reached(size))
        assert ring.seconds(size, slower) == pytest.approx(measured, rel=0.02)


def test_a_given_rate_stays_and_the_file_tells_what_is_reached_of_it(tmp_path: Path) -> None:
    path = write(tmp_path / "bench.json", ("a", "b"), Collective.ALLGATHER)
    found = bench_links(path, between=Link(1e-5, 12.5e9))
    assert found.link == Link(1e-5, 12.5e9)
    assert found.efficiency.at(1e12) == pytest.approx(0.72, rel=0.02)
    cluster = replace(A100, between=found.link, efficiency_between=found.efficiency, ranks_per_host=1)
    assert cluster.seconds("allgather", 1 << 27, Group(1, 2)) == pytest.approx((1 << 26) / 9e9, rel=0.02)


def test_files_that_say_nothing_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="one rank, which exchanges nothing"):
        bench_links(write(tmp_path / "one.json", ("a",)))
    with pytest.raises(ConfigurationError, match="no allreduce, allgather, reducescatter of two sizes"):
        bench_links(write(tmp_path / "message.json", ("a", "b"), Collective.BROADCAST))
    with pytest.raises(ConfigurationError, match="only the latency shows"):
        bench_links(write(tmp_path / "slow.json", ("a", "b"), latency=1e3))
