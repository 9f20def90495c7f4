"""A simulated schedule in the terminal: a Gantt chart, one line for each rank, and its figures."""

from __future__ import annotations

from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from unidist_pipeline.schedules.model import Action, ActionKind
from unidist_pipeline.simulation.simulator import Simulation

_STYLES = {
    ActionKind.FORWARD: ("black on bright_blue", "white on blue"),
    ActionKind.BACKWARD: ("black on bright_green", "white on green"),
    ActionKind.BACKWARD_INPUT: ("black on bright_cyan", "black on cyan"),
    ActionKind.BACKWARD_WEIGHT: ("black on bright_yellow", "black on yellow"),
}
"""Of stages with an even and with an odd place on their rank."""
_LEGEND = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward for the input",
    ActionKind.BACKWARD_WEIGHT: "backward for the weights",
}
MAX_ROWS = 40


class Chart:
    """A rich renderable: the chart as wide as the console, then the figures.

    `F3` is the forward of micro-batch 3, on the rank's first stage; `F3'` on its second. A letter alone is shown if
    there is no room for the number, a dot for time in which the rank does not compute. Of more than `MAX_ROWS` ranks,
    the first and the last are shown.

    Args:
        simulation: what to draw.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Called by rich."""
        shown = shown_ranks(self.simulation.schedule.num_ranks)
        width = len(f"rank {shown[-1]} ")
        lines: list[Text] = []
        for previous, rank in zip([-1, *shown], shown, strict=False):
            if rank != previous + 1:
                lines.append(Text(f"... {rank - previous - 1} more ranks", style="dim"))
            line = Text(f"rank {rank} ".ljust(width), no_wrap=True, overflow="crop")
            idle = "." if options.ascii_only else "·"
            lines.append(line + self._bar(rank, max(1, options.max_width - width), idle))
        yield Group(*lines, _legend(self.simulation), self._figures(shown))

    def _bar(self, rank: int, columns: int, idle: str) -> Text:
        simulation = self.simulation
        scale = columns / simulation.makespan if simulation.makespan else 0.0
        stages = simulation.schedule.stages[rank]
        bar = Text()
        for action, start, end in simulation.computing(rank):
            first, last = round(start * scale), round(end * scale)
            bar.append(idle * (first - len(bar)), style="dim")
            place = stages.index(action.stage)
            bar.append(_label(action, place, last - first), style=_STYLES[action.kind][place % 2])
        bar.append(idle * (columns - len(bar)), style="dim")
        return bar

    def _figures(self, shown: list[int]) -> Table:
        simulation = self.simulation
        table = Table("rank", "stages", "computes", "waits", "waits within", "peak activations", box=None)
        for rank in shown:
            busy = simulation.busy[rank]
            table.add_row(
                str(rank),
                " ".join(map(str, simulation.schedule.stages[rank])),
                _time(busy),
                _time(simulation.makespan - busy),
                _time(simulation.spans[rank] - busy),
                f"{simulation.peak_activations[rank]:g}",
            )
        return table


def figures(simulation: Simulation) -> dict[str, Any]:
    """Return the figures of a simulated schedule, for JSON."""
    schedule = simulation.schedule
    return {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "makespan": simulation.makespan,
        "bubble_fraction": simulation.bubble_fraction,
        "longest_bubble": simulation.longest_bubble,
        "peak_activations": list(simulation.peak_activations),
        "busy": list(simulation.busy),
    }


def headline(simulation: Simulation) -> str:
    """Return name, size and the main figures in one line."""
    schedule = simulation.schedule
    return (
        f"{schedule.name}: {schedule.num_stages} stages on {schedule.num_ranks} ranks, {schedule.num_microbatches} "
        f"micro-batches; makespan {simulation.makespan:g}, bubble {simulation.bubble_fraction:.1%}, "
        f"peak activations {max(simulation.peak_activations):g}"
    )


def shown_ranks(num_ranks: int) -> list[int]:
    """Return the ranks that a drawing shows: all, or the first and the last of too many."""
    if num_ranks <= MAX_ROWS:
        return list(range(num_ranks))
    return [*range(MAX_ROWS // 2), *range(num_ranks - MAX_ROWS // 2, num_ranks)]


def _time(value: float) -> str:
    """Format a time without the rounding errors of floating-point sums."""
    return f"{round(value, 9):g}"


def _label(action: Action, place: int, width: int) -> str:
    label = f"{action.kind.value}{action.microbatch}{chr(39) * place}"
    return label.ljust(width) if len(label) <= width else action.kind.value * width


def _legend(simulation: Simulation) -> Text:
    used = {action.kind for actions in simulation.schedule.ranks for action in actions}
    legend = Text()
    for kind, meaning in _LEGEND.items():
        if kind in used:
            legend.append(f" {kind.value} ", style=_STYLES[kind][0])
            legend.append(f" {meaning}  ")
    return legend
