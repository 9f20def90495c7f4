"""Links from a file of `unidist bench --json`: latency, bandwidth, and what collectives reach of it by size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unidist.cost_model.collectives import Link, cost
from unidist.cost_model.efficiency import Efficiency
from unidist.cost_model.step import Operation
from unidist.errors import ConfigurationError
from unidist_bench import Results, Series, read
from unidist_planner.step_time.measurements import fitted

_USED: tuple[Operation, ...] = ("allreduce", "allgather", "reducescatter")
"""The collectives that tell what a link reaches, the best first."""
_TELLING = 0.05
"""Times that are nearly all latency say nothing of the bandwidth: below this part, a size is left out."""


@dataclass(frozen=True)
class BenchLinks:
    """The results of a run of `unidist bench`.

    Args:
        is_inside: its ranks were on one host.
        link: a ring over it takes as long as was measured; between hosts it is that of a host, which its ranks share.
        efficiency: the part of its bandwidth that was reached, by size.
    """

    is_inside: bool
    link: Link
    efficiency: Efficiency


def bench_links(path: Path, *, inside: Link | None = None, between: Link | None = None) -> BenchLinks:
    """Return what a file says.

    Args:
        path: of `unidist bench --json`, with all-reduces, all-gathers or reduce-scatters of several sizes.
        inside: the rate of the link inside of a host, if it is known; default: the best that was reached.
        between: likewise between hosts.

    Raises:
        ConfigurationError: it is no such file, or has none of these collectives with two sizes or more.
    """
    results = read(path)
    is_inside = len(set(results.hosts)) == 1
    given = inside if is_inside else between
    operation, points = _points(results, path)
    ring = cost(operation, "ring", results.num_ranks)
    latency = fitted(points).fixed / ring.latencies
    fixed = latency * ring.latencies
    rates = {
        size: size * ring.moves / (seconds - fixed) for size, seconds in points if seconds - fixed > _TELLING * seconds
    }
    if not rates:
        raise ConfigurationError(f"{path}: all sizes are so small that only the latency shows; measure up to 64 MiB")
    bandwidth = max(rates.values()) if given is None else given.bandwidth
    efficiency = Efficiency.of([(size, rate / bandwidth) for size, rate in rates.items()])
    return BenchLinks(is_inside, Link(latency if given is None else given.latency, bandwidth), efficiency)


def _points(results: Results, path: Path) -> tuple[Operation, list[tuple[float, float]]]:
    """Return the times of the plain communicator, by size."""
    if results.num_ranks < 2:
        raise ConfigurationError(f"{path} has one rank, which exchanges nothing; measure with 2 or more")
    series: dict[str, Series] = {str(one.collective): one for one in results.series}
    for operation in _USED:
        rows = series[operation].rows if operation in series else []
        points = [(float(row.bytes), next(iter(row.sides.values())).median) for row in rows if row.bytes]
        if len({size for size, _ in points}) >= 2:
            return operation, points
    raise ConfigurationError(
        f"{path} has no {', '.join(_USED)} of two sizes or more: unidist bench allreduce --json ..."
    )
