"""Results of `unidist bench`, as the ranks tell them and as a JSON file. Plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unidist.errors import ConfigurationError
from unidist_bench.collectives import Collective
from unidist_bench.statistics import Figures

FORMAT = "unidist bench 1"
OURS = "unidist"
"""The side that every row has: the plain communicator."""
NAMED = "named"
"""The side of named operations, which ranks negotiate."""


@dataclass(frozen=True)
class Row:
    """One size.

    Args:
        bytes: of the larger buffer, see `unidist_bench.collectives`.
        count: its elements.
        sides: figures of what took turns, by name; first the plain communicator, `OURS`.
    """

    bytes: int
    count: int
    sides: Mapping[str, Figures]


@dataclass(frozen=True)
class Series:
    """One collective over all sizes.

    Args:
        collective: which.
        dtype: name of the element type.
        op: name of the reduction; "" if it does not reduce.
        in_place: source and target were the same memory.
        rows: by ascending size.
    """

    collective: Collective
    dtype: str
    op: str
    in_place: bool
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Results:
    """A run.

    Args:
        version: of unidist.
        date: of its beginning, ISO 8601.
        engine: that moved the bytes, in words.
        memory: "engine" or "ordinary".
        hosts: name of the host of each rank, by rank: whether they are near or far.
        beside: versions of the peers, by name.
        series: one for each collective.
    """

    version: str
    date: str
    engine: str
    memory: str
    hosts: tuple[str, ...]
    beside: Mapping[str, str] = field(default_factory=dict)
    series: list[Series] = field(default_factory=list)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def num_wrong(self) -> int:
        """Wrong elements of all rows and sides."""
        return sum(side.wrong or 0 for one in self.series for row in one.rows for side in row.sides.values())


def as_json(results: Results) -> str:
    """Return the text of a file: times in seconds, bandwidths in bytes per second."""
    series = [
        {
            **asdict(one),
            "rows": [
                {
                    "bytes": row.bytes,
                    "count": row.count,
                    "sides": {name: _side(figures, row, one, results) for name, figures in row.sides.items()},
                }
                for row in one.rows
            ],
        }
        for one in results.series
    ]
    head = {"format": FORMAT, **asdict(results), "num_ranks": results.num_ranks}
    return json.dumps({**head, "series": series}, indent=2) + "\n"


def read(path: Path) -> Results:
    """Return what a file of `unidist bench --json` holds.

    Raises:
        ConfigurationError: there is no such file, or it is none of these.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found.pop("format") != FORMAT:
            raise ValueError("another format")
        series = [series_from(one) for one in found["series"]]
        return Results(
            version=str(found["version"]),
            date=str(found["date"]),
            engine=str(found["engine"]),
            memory=str(found["memory"]),
            hosts=tuple(found["hosts"]),
            beside=found["beside"],
            series=series,
        )
    except OSError as exc:
        raise ConfigurationError(f"{path} cannot be read: {exc.strerror}. `unidist bench --json` writes one") from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigurationError(
            f"{path} holds no results in the format {FORMAT!r} ({exc}). `unidist bench --json` writes them"
        ) from exc


def series_from(found: Mapping[str, Any]) -> Series:
    """Return a series, with its rows, from plain data."""
    return Series(
        Collective(found["collective"]),
        found["dtype"],
        found["op"],
        found["in_place"],
        [row_from(row) for row in found["rows"]],
    )


def row_from(found: Mapping[str, Any]) -> Row:
    """Return a row from plain data."""
    sides = {
        name: Figures(side["min"], side["median"], side["p99"], side["wrong"]) for name, side in found["sides"].items()
    }
    return Row(found["bytes"], found["count"], sides)


def _side(figures: Figures, row: Row, series: Series, results: Results) -> dict[str, Any]:
    return {
        **asdict(figures),
        "algorithm_bandwidth": figures.algorithm_bandwidth(row.bytes),
        "bus_bandwidth": figures.bus_bandwidth(row.bytes, series.collective, results.num_ranks),
    }
