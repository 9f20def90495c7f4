"""Latency and bandwidth of collectives: `unidist bench`, and what measures things that take turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_bench.results import FORMAT, Results, Row, Series, read
    from unidist_bench.statistics import Figures, bus_factor
    from unidist_bench.turns import BenchmarkRanks, Durations, side_by_side, take_turns

__all__ = [
    "FORMAT", "BenchmarkRanks", "Durations", "Figures", "Results", "Row", "Series", "bus_factor", "read",
    "side_by_side", "take_turns",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "results": "FORMAT Results Row Series read",
        "statistics": "Figures bus_factor",
        "turns": "BenchmarkRanks Durations side_by_side take_turns",
    },
)
