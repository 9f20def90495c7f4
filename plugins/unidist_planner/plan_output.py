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
_MAX_COLUMNS = 1000


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
        table = _table(found, problem)
        # Lines that are longer than those of the terminal are wrapped by it: cut, a strategy could not be copied.
        Console(width=_MAX_COLUMNS).print(table)
        console.print("\nThe time of a step:", highlight=False)
        for number, item in enumerate(found.best, start=1):
            console.print(f"{number}. {escape(bounds(item))}", highlight=False, soft_wrap=True)
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
        for line in explained(found, problem)[1:]:  # its time is in the table and the list
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
    table = Table("", box=None, padding=(0, 2, 0, 0))  # with borders it would not fit a terminal of 80 columns
    for name in ("replicas", "micro-batch", "s/step", "samples/s", "TFLOP/s", "GB/rank"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("strategy", no_wrap=True)
    for number, item in enumerate(found.best, start=1):
        table.add_row(
            str(number),
            str(item.axes.get("data", 1)),
            f"{item.num_pieces} x {item.samples}",
            f"{item.seconds:.3g}",
            f"{problem.work.batch / item.seconds:.3g}",
            f"{item.flops / 1e12:.3g}",
            f"{item.estimate.total() / _GIGA:.3g}",
            escape(item.line or PLAIN),
        )
    return table
