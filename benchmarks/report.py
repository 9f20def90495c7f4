"""What `make bench` shows: a table of ratios with their targets, and a plot of the medians."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {"at least": operator.ge, "at most": operator.le}


@dataclass(frozen=True)
class Row:
    """One comparison.

    Args:
        what: the thing measured.
        value: the ratio (or time) found.
        unit: "x" for a ratio, "s" for seconds.
        relation: "at least" or "at most".
        target: what is wanted.
        detail: the two medians, in words.
    """

    what: str
    value: float
    unit: str
    relation: str
    target: float
    detail: str

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return _COMPARISONS[self.relation](self.value, self.target)


def duration(seconds: float) -> str:
    """Return a duration in a readable unit."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    table = Table(title="side by side, medians; every row is one run in which both took turns")
    for column in ("measured", "found", "wanted", "", "medians"):
        table.add_column(column)
    for row in rows:
        mark = "[green]met[/]" if row.met else "[red]missed[/]"
        table.add_row(
            row.what, f"{row.value:.2f}{row.unit}", f"{row.relation} {row.target:g}{row.unit}", mark, row.detail
        )
    Console(width=150).print(table)


def save(folder: Path, groups: Mapping[str, Mapping[str, float]], rows: Sequence[Row]) -> None:
    """Write `bench.json` and `bench.png`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(
        json.dumps({"medians_seconds": groups, "rows": [vars(row) | {"met": row.met} for row in rows]}, indent=2)
    )
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
