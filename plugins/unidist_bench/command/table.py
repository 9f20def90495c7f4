"""The table of `unidist bench`, line by line. Lines without figures begin with #, as in nccl-tests. Pure."""

from __future__ import annotations

from unidist_bench.collectives import TRAITS
from unidist_bench.results import OURS, Results, Row, Series

_NONE = "-"


def head(results: Results) -> list[str]:
    """Return the lines before everything."""
    per_host: dict[str, int] = {}
    for host in results.hosts:
        per_host[host] = per_host.get(host, 0) + 1
    places = ", ".join(f"{number} on {host}" for host, number in per_host.items())
    lines = [
        f"# unidist {results.version}, {results.date}",
        f"# {results.num_ranks} ranks ({places}), {results.engine}, {results.memory} memory",
    ]
    if results.beside:
        lines.append("# beside it: " + ", ".join(f"{name} ({version})" for name, version in results.beside.items()))
    return lines


def title(series: Series, others: tuple[str, ...]) -> list[str]:
    """Return the lines before the rows of a collective.

    Args:
        series: of the collective.
        others: names of the sides but for our own.
    """
    way = "in place" if series.in_place else "out of place"
    words = [str(series.collective), *([way] if TRAITS[series.collective].has_data else [])]
    ours = f"{'bytes':>11} {'count':>11} {'type':>10} {'op':>8} {'min':>10} {'median':>10} {'p99':>10}"
    ours += f" {'algbw':>9} {'busbw':>9} {'#wrong':>7}"
    units = f"{'':>11} {'':>11} {'':>10} {'':>8} {'us':>10} {'us':>10} {'us':>10} {'GB/s':>9} {'GB/s':>9} {'':>7}"
    for name in others:
        ours += f" {name:>10} {'ratio':>7}"
        units += f" {'us':>10} {'':>7}"
    return ["#", f"# {', '.join(words)}", f"#{ours[1:]}", f"#{units[1:]}".rstrip()]


def line(row: Row, series: Series, num_ranks: int) -> str:
    """Return a row. Of other sides it has the median, and that median by ours; #wrong is that of all sides."""
    ours = row.sides[OURS]
    has_data = TRAITS[series.collective].has_data
    text = f"{row.bytes:>11} {row.count:>11} {series.dtype if has_data else _NONE:>10} {series.op or _NONE:>8}"
    text += "".join(f" {_us(seconds):>10}" for seconds in (ours.min, ours.median, ours.p99))
    rates = ours.algorithm_bandwidth(row.bytes), ours.bus_bandwidth(row.bytes, series.collective, num_ranks)
    text += "".join(f" {f'{rate / 1e9:.3f}' if has_data else _NONE:>9}" for rate in rates)
    text += f" {_NONE if ours.wrong is None else sum(side.wrong or 0 for side in row.sides.values()):>7}"
    for name, side in row.sides.items():
        if name != OURS:
            text += f" {_us(side.median):>10} {side.median / ours.median:>7.2f}"
    return text


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}" if seconds < 0.1 else f"{seconds * 1e6:.0f}"
