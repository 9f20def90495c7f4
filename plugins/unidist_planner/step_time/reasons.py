"""Why a division is as fast as it is, and why another one does not do: sentences for people."""

from __future__ import annotations

from unidist.cost_model.step_interface import SearchProblem
from unidist_planner.step_time.prediction import Prediction
from unidist_planner.step_time.search import Found

_GIGA = 1e9
_WORTH_SAYING = 0.01


def bounds(found: Prediction) -> str:
    """Return what takes the time of a step: the arithmetic, and the two parts beside it that take most."""
    useful = sum(part.seconds for part in found.parts if part.is_useful) / found.seconds
    others = sorted((part for part in found.parts if not part.is_useful), key=lambda part: -part.seconds)
    said = [f"{useful:.0%} arithmetic"]
    for part in others[:2]:
        share = part.seconds / found.seconds
        if share >= _WORTH_SAYING:
            said.append(f"{share:.0%} {part.name}" + (f" ({part.detail})" if part.detail else ""))
    return "; ".join(said)


def holds(found: Prediction, limit: float | None) -> str:
    """Return what a rank holds, most of what it is, and of how much it may."""
    device = [line for line in found.estimate.lines if line.place == "device"]
    most = max(device, key=lambda line: line.num_bytes)
    of = "" if limit is None else f" of {limit / _GIGA:.3g}"
    total = found.estimate.total()
    return f"holds {total / _GIGA:.3g}{of} GB, {most.num_bytes / total:.0%} of it {most.name}"


def misses(found: Prediction, limit: float, best: Prediction | None) -> str:
    """Return why a division is not among the best: it does not fit, and what it would be worth if it did."""
    device = [line for line in found.estimate.lines if line.place == "device"]
    most = max(device, key=lambda line: line.num_bytes)
    said = (
        f"needs {found.estimate.total() / _GIGA:.3g} GB of {limit / _GIGA:.3g}, "
        f"{most.num_bytes / _GIGA:.3g} of it for {most.name}"
    )
    return said if best is None else f"{said}; it would take {found.seconds / best.seconds:.0%} of the best one's time"


def explained(found: Found, problem: SearchProblem) -> tuple[str, ...]:
    """Return why the best division was chosen, in three lines: its time, its memory, and the next one; () if none fits.

    Args:
        found: by a search.
        problem: of the search.
    """
    if not found.best:
        return ()
    best, limit = found.best[0], problem.cluster.memory_bytes
    time = f"time: {best.seconds:.3g} s for a step, {bounds(best)}"
    memory = f"memory: a rank {holds(best, limit)}"
    if found.misses and limit is not None:
        memory += f"; {found.misses[0].line or 'plain data parallelism'} {misses(found.misses[0], limit, best)}"
    else:
        memory += "; nothing that is faster was left out for want of it"
    if len(found.best) < 2:
        return time, memory, "next: no other division goes together"
    other = found.best[1]
    ours, theirs = ({part.name: part.seconds for part in item.parts} for item in (best, other))
    longer = max(theirs, key=lambda name: theirs[name] - ours.get(name, 0.0))
    more = theirs[longer] - ours.get(longer, 0.0)
    line = other.line or "plain data parallelism"
    said = f"next: {line} takes {other.seconds / best.seconds - 1:.1%} longer"
    return time, memory, f"{said}, {more:.2g} s of it more for {longer}" if more > 0 else said
