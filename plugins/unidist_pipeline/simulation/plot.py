"""A simulated schedule as a picture, by matplotlib, which is imported when used."""

from __future__ import annotations

from pathlib import Path

from unidist.errors import ConfigurationError
from unidist_pipeline.schedules.model import ActionKind
from unidist_pipeline.simulation.drawing import headline, shown_ranks
from unidist_pipeline.simulation.simulator import Simulation

_COLOURS = {
    ActionKind.FORWARD: ("#8fb8de", "#5b8ec4", "forward"),
    ActionKind.BACKWARD: ("#94c58c", "#5f9e57", "backward"),
    ActionKind.BACKWARD_INPUT: ("#7fcdc4", "#4aa79d", "backward for the input"),
    ActionKind.BACKWARD_WEIGHT: ("#f2cf7e", "#d9a93b", "backward for the weights"),
}
_MAX_LABELS = 2000


def write_plot(simulation: Simulation, path: Path) -> None:
    """Draw a simulated schedule into a file, in the format that its ending names (png, pdf, svg, ...).

    Stages with an odd place on their rank are darker. Of very many ranks the first and the last are shown.

    Raises:
        ConfigurationError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as exc:
        raise ConfigurationError(
            f"drawing into {path} needs matplotlib, which cannot be imported ({exc}). `pip install matplotlib`, or use "
            "the chart in the terminal."
        ) from exc

    shown = shown_ranks(simulation.schedule.num_ranks)
    num_bars = sum(len(list(simulation.computing(rank))) for rank in shown)
    width = min(
        40.0, max(8.0, 0.3 * simulation.schedule.num_microbatches * simulation.schedule.num_stages / len(shown))
    )
    figure = Figure(figsize=(width, 1.6 + 0.35 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    used: set[ActionKind] = set()
    for row, rank in enumerate(shown):
        stages = simulation.schedule.stages[rank]
        bars = list(simulation.computing(rank))
        used |= {action.kind for action, _, _ in bars}
        axes.broken_barh(
            [(start, end - start) for _, start, end in bars],
            (row - 0.45, 0.9),
            facecolors=[_COLOURS[action.kind][stages.index(action.stage) % 2] for action, _, _ in bars],
            edgecolor="white",
            linewidth=0.5,
        )
        for action, start, end in bars if num_bars <= _MAX_LABELS else ():
            axes.text((start + end) / 2, row, str(action.microbatch), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(shown)), [f"rank {rank}" for rank in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, simulation.makespan or 1)
    axes.set_xlabel("time")
    axes.set_title(headline(simulation), fontsize=9)
    handles = [Patch(color=colour, label=label) for kind, (colour, _, label) in _COLOURS.items() if kind in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as exc:  # ValueError: an ending that matplotlib does not know
        raise ConfigurationError(f"the chart cannot be written to {path}: {exc}") from exc
