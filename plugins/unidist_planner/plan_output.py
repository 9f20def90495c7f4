"""Output of `unidist plan`: a table, a sentence of reasons for each row, or JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unidist.cost_model.step_interface import SearchProblem
from unidist.cost_model.work import ModelWork
from unidist_planner.estimate_output import PLAIN
from unidist_planner.step_time.fit import Fit
from unidist_planner.step_time.prediction import Prediction
from unidist_planner.step_time.reasons import bounds, explained, holds, misses
from unidist_planner.step_time.search import Found

_GIGA = 1e9


def as_json(found: Found, problem: SearchProblem, *, script: str, fit: Fit | None) -> str:
    """Return everything as JSON; times in seconds, sizes in bytes."""
    limit = problem.cluster.memory_bytes
    best = found.best[0] if found.best else None
    return json.dumps(
        {
            "ranks": problem.world_size,
            "batch": problem.work.batch,
            "model": _model(problem.work),
            "unknown": _unknown(found),
            "memory": limit,
            "fit": None if fit is None else fit.described(),
            "why": list(explained(found, problem)),
            "command": _command(found, problem, script),
            "tried": found.num_tried,
            "fitting": found.num_fitting,
            "best": [
                _described(item, problem) | {"reason": f"{bounds(item)}; {holds(item, limit)}"} for item in found.best
            ],
            "too_large": [
                _described(item, problem) | {"reason": misses(item, limit or 0.0, best)} for item in found.misses
            ],
        },
        indent=2,
    )


def _unknown(found: Found) -> list[str]:
    """Return what the memory of the plans is without."""
    return sorted({name for item in (*found.best, *found.misses) for name in item.estimate.unknown})


def _model(work: ModelWork) -> dict[str, Any]:
    """Return what was planned with: operations are those of a forward pass of one sample."""
    model, piece = work.workload(1).model, work.forward(1, 4)
    return {
        "parameters": model.parameters,
        "blocks": work.num_blocks,
        "flops": piece.blocks + piece.outside,
        "layers": [{"path": part.path, "parameters": part.parameters, "flops": part.flops} for part in work.layers()],
    }


def _described(item: Prediction, problem: SearchProblem) -> dict[str, Any]:
    return {
        "strategy": item.line,
        "mesh": item.axes,
        "seconds": item.seconds,
        "samples_per_second": problem.work.batch / item.seconds,
        "flops": item.flops,
        "micro_batch": item.samples,
        "micro_batches": item.num_pieces,
        "bytes": round(item.estimate.total()),
        "parts": [{"name": part.name, "seconds": part.seconds, "detail": part.detail} for part in item.parts],
    }


def show(found: Found, problem: SearchProblem, *, script: str, fit: Fit | None) -> None:
    """Print the table of the best, and why; then what would be faster if it fitted, and how to start the best."""
    console = Console()
    for line in () if fit is None else fit.lines():
        console.print(escape(line), highlight=False, soft_wrap=True)
    limit = problem.cluster.memory_bytes
    counts = (
        f"{found.num_tried:,} plans tried, {found.num_fitting:,} fit" if limit else f"{found.num_tried:,} plans tried"
    )
    for name in _unknown(found):
        console.print(f"[yellow]Not known, and not counted: {escape(name)}[/yellow]", highlight=False)
    model = _model(problem.work)
    console.print(
        f"{model['parameters']:,} parameters, {model['blocks']} blocks, {model['flops'] / _GIGA:,.3g} GFLOP for a "
        "sample's forward pass",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"{problem.world_size:,} ranks, a batch of {problem.work.batch:,}: {counts}", highlight=False)
    if found.best:
        console.print(_table(found, problem))
        for number, item in enumerate(found.best, start=1):
            console.print(f"{number}. [bold]{escape(item.line or PLAIN)}[/bold]", highlight=False, soft_wrap=True)
            console.print(f"   {escape(bounds(item))}; {holds(item, limit)}.", highlight=False, soft_wrap=True)
    else:
        console.print("[red]Nothing fits.[/red] Closest:")
    best = found.best[0] if found.best else None
    if found.misses and limit is not None:
        if best is not None:
            console.print("\nFaster, if a rank had more memory:")
        for item in found.misses:
            console.print(
                f"- {escape(item.line or PLAIN)}: {misses(item, limit, best)}.", highlight=False, soft_wrap=True
            )
    if found.best:
        console.print("\nWhy the first one:", highlight=False)
        for line in explained(found, problem):
            console.print(f"- {escape(line)}", highlight=False, soft_wrap=True)
        console.print(f"\n{escape(_command(found, problem, script))}", highlight=False, soft_wrap=True)


def _command(found: Found, problem: SearchProblem, script: str) -> str:
    """Return the command that starts the best plan; "" if none fits."""
    if not found.best:
        return ""
    words = ["unidist launch", f"-np {problem.world_size}"]
    if problem.cluster.ranks_per_host < problem.world_size:
        words.append("--hostfile hosts.txt")
    if found.best[0].line:
        words.append(f"--strategy {found.best[0].line}")
    return " ".join([*words, script])


def _table(found: Found, problem: SearchProblem) -> Table:
    axes = [axis for axis in found.best[0].axes if any(item.axes.get(axis, 1) > 1 for item in found.best)]
    axes += [axis for item in found.best for axis in item.axes if axis not in axes and item.axes[axis] > 1]
    axes = list(dict.fromkeys(axes))
    table = Table("", box=None, padding=(0, 2, 0, 0))  # with borders it would not fit a terminal of 80 columns
    for name in (*axes, "micro-batch", "s/step", "samples/s", "TFLOP/s", "GB"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, item in enumerate(found.best, start=1):
        table.add_row(
            str(number),
            *(str(item.axes.get(axis, 1)) for axis in axes),
            f"{item.num_pieces} x {item.samples}",
            f"{item.seconds:.3g}",
            f"{problem.work.batch / item.seconds:.3g}",
            f"{item.flops / 1e12:.3g}",
            f"{item.estimate.total() / _GIGA:.3g}",
        )
    return table
