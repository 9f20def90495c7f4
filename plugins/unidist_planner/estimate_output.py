"""Output of `unidist estimate`: a table by category, bars by strategy, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from unidist.cost_model.figures import Workload
from unidist_planner.memory.comparison import StrategyCandidate
from unidist_planner.memory.estimate import Estimate

PLAIN = "(none)"
"""How the empty strategy line is shown."""
_GIGA = 1e9
_MARKS = "█▓▒░◼▪"
_COLORS = ("blue", "green", "magenta", "cyan", "yellow", "red")
_LONGEST_BAR, _SHORTEST_BAR = 48, 12


def as_json(workload: Workload, candidates: Sequence[StrategyCandidate], *, num_ranks: int, limit: float | None) -> str:
    """Return everything as JSON; sizes in bytes. The first candidate is the one that was asked for."""
    return json.dumps(
        {
            "parameters": workload.model.parameters,
            "trained": workload.model.num_trained,
            "optimizer": workload.optimizer,
            "ranks": num_ranks,
            "memory": limit,
            "unknown": list(candidates[0].estimate.unknown),
            "strategies": [_described(item, limit) for item in candidates],
        },
        indent=2,
    )


def _described(item: StrategyCandidate, limit: float | None) -> dict[str, Any]:
    return {
        "strategy": item.line,
        "bytes": [
            {"name": line.name, "bytes": round(line.num_bytes), "place": line.place} for line in item.estimate.lines
        ],
        "device": round(item.estimate.total()),
        "host": round(item.estimate.total("host")),
        "file": round(item.estimate.total("file")),
        "fits": None if limit is None else item.estimate.total() <= limit,
    }


def show(workload: Workload, candidates: Sequence[StrategyCandidate], *, num_ranks: int, limit: float | None) -> None:
    """Print the table of the first candidate, then bars of all of them."""
    console = Console()
    chosen = candidates[0]
    model = workload.model
    trained = "" if model.num_trained == model.parameters else f" ({model.num_trained:,} trained)"
    console.print(
        f"{model.parameters:,} parameters{trained}, {workload.optimizer}, {num_ranks} "
        f"{'rank' if num_ranks == 1 else 'ranks'}; sizes for one rank, 1 GB = 10^9 bytes",
        highlight=False,
    )
    console.print(_categories(chosen))
    console.print(_bars(candidates, limit, console.width))
    names = _names(candidates)
    console.print(Text("  ").join(Text(f"{_mark(names, name)} {name}", style=_color(names, name)) for name in names))
    if chosen.estimate.unknown:
        missing = " and ".join(chosen.estimate.unknown)
        console.print(f"Not included, because the figures do not tell: {missing}.", highlight=False)


def _categories(chosen: StrategyCandidate) -> Table:
    table = Table("category", title=f"strategy {escape(chosen.line or PLAIN)}", title_justify="left")
    table.add_column("GB", justify="right")
    table.add_column("where")
    for line in chosen.estimate.lines:
        table.add_row(line.name, _gb(line.num_bytes), line.place)
    table.add_section()
    for place in ("device", "host", "file"):
        if chosen.estimate.total(place) or place == "device":
            table.add_row("[bold]total[/bold]", f"[bold]{_gb(chosen.estimate.total(place))}[/bold]", place)
    return table


def _bars(candidates: Sequence[StrategyCandidate], limit: float | None, width: int) -> Table:
    names = _names(candidates)
    fits = "" if limit is None else f"fits {_gb(limit)} GB"
    longest = max(len(item.line or PLAIN) for item in candidates)
    # The bars get what the other columns leave over; of four columns each has a border and two spaces.
    bar_width = min(_LONGEST_BAR, max(_SHORTEST_BAR, width - longest - len("0.00123") - len(fits) - 13))
    scale = bar_width / max(item.estimate.total() for item in candidates)
    table = Table(title="strategies, on the device", title_justify="left")
    table.add_column("strategy", overflow="fold")
    table.add_column("GB", justify="right", no_wrap=True)
    if limit is not None:
        table.add_column(fits, no_wrap=True)
    table.add_column("", no_wrap=True, min_width=bar_width)
    for item in candidates:
        row: list[str | Text] = [escape(item.line or PLAIN), _gb(item.estimate.total())]
        if limit is not None:
            row.append("[green]yes[/green]" if item.estimate.total() <= limit else "[red]no[/red]")
        table.add_row(*row, _bar(item.estimate, names, scale))
    return table


def _bar(estimate: Estimate, names: Sequence[str], scale: float) -> Text:
    """Return one stacked bar; its length is rounded as a whole, so that it does not depend on the number of parts."""
    bar = Text()
    drawn, reached = 0, 0.0
    for name in names:
        reached += sum(line.num_bytes for line in estimate.lines if line.name == name and line.place == "device")
        cells = round(reached * scale) - drawn
        bar.append(_mark(names, name) * cells, style=_color(names, name))
        drawn += cells
    return bar


def _names(candidates: Sequence[StrategyCandidate]) -> list[str]:
    return list(dict.fromkeys(line.name for item in candidates for line in item.estimate.lines))


def _mark(names: Sequence[str], name: str) -> str:
    return _MARKS[names.index(name) % len(_MARKS)]


def _color(names: Sequence[str], name: str) -> str:
    return _COLORS[names.index(name) % len(_COLORS)]


def _gb(num_bytes: float) -> str:
    """Return gigabytes as papers print them: 120, 31.4, 1.88; 0.0042 for what is small."""
    value = num_bytes / _GIGA
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
