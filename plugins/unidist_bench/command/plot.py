"""The plot of `unidist bench`: time and bus bandwidth by size, for each collective. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from unidist.errors import ConfigurationError
from unidist_bench.collectives import TRAITS
from unidist_bench.results import Results

_SUFFIXES = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Refuse a plot that cannot be drawn, before anything is measured.

    Raises:
        ConfigurationError: matplotlib is not installed, or the file is of no kind that it writes.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigurationError(f"--plot {path}: its name ends in none of {', '.join(_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("--plot needs matplotlib, which is not installed: pip install matplotlib")


def draw(results: Results, path: Path) -> None:
    """Write the plot; a barrier, which has no sizes, is left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [one for one in results.series if TRAITS[one.collective].has_data]
    figure, axes = pyplot.subplots(
        2, max(1, len(drawn)), figsize=(4.6 * max(1, len(drawn)), 7), layout="constrained", squeeze=False
    )
    for column, one in enumerate(drawn):
        times, rates = axes[0][column], axes[1][column]
        sizes = [row.bytes for row in one.rows]
        for name in one.rows[0].sides:
            times.plot(sizes, [row.sides[name].median * 1e6 for row in one.rows], marker=".", label=name)
            busy = [
                row.sides[name].bus_bandwidth(row.bytes, one.collective, results.num_ranks) / 1e9 for row in one.rows
            ]
            rates.plot(sizes, busy, marker=".", label=name)
        times.set(title=str(one.collective), ylabel="us, median", xscale="log", yscale="log")
        rates.set(xlabel="bytes", ylabel="bus bandwidth, GB/s", xscale="log")
        for axis in (times, rates):
            axis.grid(alpha=0.3)
            axis.legend(loc="upper left")  # "best" takes its time
    figure.suptitle(f"{results.num_ranks} ranks, {results.engine}, {results.memory} memory")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
