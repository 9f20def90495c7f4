"""What `make bench` shows: a table of ratios, each with its spread and a verdict, and a plot of the medians.

Every row is measured in several rounds, each in new processes. The spread of a row is from its lowest round to
its highest, and is what a verdict allows for.
"""

from __future__ import annotations

import json
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {"at least": operator.ge, "at most": operator.le}


@dataclass(frozen=True)
class Row:
    """One comparison.

    Args:
        what: the thing measured.
        value: the ratio (or time) found; the median of the rounds.
        unit: "x" for a ratio, "s" for seconds.
        relation: "at least" or "at most".
        target: what is wanted.
        detail: the two medians, in words.
        rounds: the values of all rounds; without any, that one.
    """

    what: str
    value: float
    unit: str
    relation: str
    target: float
    detail: str
    rounds: tuple[float, ...] = ()

    @property
    def low(self) -> float:
        """The lowest round."""
        return min(self.rounds, default=self.value)

    @property
    def high(self) -> float:
        """The highest round."""
        return max(self.rounds, default=self.value)

    @property
    def is_higher_better(self) -> bool:
        """Whether the value says how many times as fast, and not how long."""
        return self.relation == "at least"

    @property
    def par(self) -> float:
        """What the verdict compares with: a peer's own speed; of what has no peer, as a step alone, what is wanted."""
        return 1.0 if self.unit == "x" and (self.is_higher_better or self.target <= 1) else self.target

    @property
    def verdict(self) -> str:
        """Return "ahead" or "behind" if all rounds are, else "level"."""
        if self.low > self.par:
            return "ahead" if self.is_higher_better else "behind"
        if self.high < self.par:
            return "behind" if self.is_higher_better else "ahead"
        return "level"

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return _COMPARISONS[self.relation](self.value, self.target)


def duration(seconds: float) -> str:
    """Return a duration in a readable unit."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def combined(rounds: Sequence[Sequence[Row]]) -> list[Row]:
    """Return one row for each comparison, with the values of all rounds in which it was made."""
    found: dict[str, list[Row]] = {}
    for row in (row for each in rounds for row in each):
        found.setdefault(row.what, []).append(row)
    rows = []
    for same in found.values():
        ordered = sorted(same, key=lambda row: row.value)
        middle = ordered[(len(ordered) - 1) // 2]  # whose medians are shown
        values = tuple(row.value for row in same)
        rows.append(replace(middle, value=statistics.median(values), rounds=values))
    return rows


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    table = Table(title="side by side, medians of rounds; every row is measured in turns with its peer")
    for column in ("measured", "found", "rounds", "verdict", "wanted", "", "medians"):
        table.add_column(column)
    for row in rows:
        mark = "[green]met[/]" if row.met else "[red]missed[/]"
        wanted = f"{row.relation} {row.target:g}{row.unit}"
        table.add_row(row.what, _found(row), _spread(row), row.verdict, wanted, mark, row.detail)
    Console(width=170).print(table)


def markdown(rows: Sequence[Row]) -> str:
    """Return the table for docs/figures.md."""
    lines = ["| what | measured | rounds | verdict | wanted |", "|---|---|---|---|---|"]
    for row in rows:
        wanted = f"{row.relation} {row.target:g}{row.unit}"
        lines.append(f"| {row.what} | {_found(row)} | {_spread(row)} | {row.verdict} | {wanted} |")
    return "\n".join(lines) + "\n"


def _found(row: Row) -> str:
    return f"{row.value:.2f}{row.unit}"


def _spread(row: Row) -> str:
    return f"{row.low:.2f} to {row.high:.2f}"


def save(folder: Path, groups: Mapping[str, Mapping[str, float]], rows: Sequence[Row]) -> None:
    """Write `bench.json`, which `--compare` reads, `bench.md`, and `bench.png`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(
        json.dumps({"medians_seconds": groups, "rows": [asdict(row) | _judged(row) for row in rows]}, indent=2)
    )
    (folder / "bench.md").write_text(markdown(rows))
    figure, axes = pyplot.subplots(1, len(groups), figsize=(4.2 * len(groups), 4), layout="constrained", squeeze=False)
    for axis, (title, medians) in zip(axes[0], groups.items(), strict=True):
        names = list(medians)
        colors = [
            "tab:orange"
            if any(word in name for word in ("gloo", "torchrun", "Horovod", "MultiWorkerMirrored"))
            else "tab:blue"
            for name in names
        ]
        bars = axis.barh(names, [medians[name] for name in names], color=colors)
        axis.bar_label(bars, labels=[duration(medians[name]) for name in names], padding=3)
        axis.set_title(title)
        axis.set_xlabel("seconds, median")
        axis.margins(x=0.3)
        axis.invert_yaxis()
    figure.savefig(folder / "bench.png", dpi=120)
    pyplot.close(figure)


def _judged(row: Row) -> dict[str, object]:
    return {"met": row.met, "verdict": row.verdict}


def read_rows(path: Path) -> list[Row]:
    """Return the rows that a file `bench.json` has; of one that was written before there were rounds, too."""
    kept = Row.__dataclass_fields__.keys()
    rows = [{key: value for key, value in row.items() if key in kept} for row in json.loads(path.read_text())["rows"]]
    return [Row(**{**row, "rounds": tuple(row.get("rounds", ()))}) for row in rows]
