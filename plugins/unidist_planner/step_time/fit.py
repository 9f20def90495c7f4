"""Corrects the figures of the machines by measured runs of the user's own."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from unidist.cost_model.cluster import Cluster
from unidist.cost_model.efficiency import Efficiency
from unidist.cost_model.step_interface import SearchProblem
from unidist.errors import ConfigurationError
from unidist.strategy import StrategySpec
from unidist.strategy.plan import build, make_plan
from unidist_planner.step_time.prediction import predict

_WIDEST = 64.0
"""Figures are corrected by no more than this factor."""
_ROUNDS, _STEPS = 12, 4


@dataclass(frozen=True)
class MeasuredRun:
    """A measured run.

    Args:
        line: its strategies.
        ranks: its number of ranks.
        batch: samples of an update.
        seconds: of a step, the median.
    """

    line: str
    ranks: int
    batch: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A correction.

    Args:
        cluster: the corrected machines.
        speed: by which all rates of a rank were multiplied: arithmetic and memory.
        links: by which all bandwidths were; 1 if the runs do not tell.
        runs: what it was fitted to.
        before: predictions for them before, in seconds.
        after: likewise with the correction.
    """

    cluster: Cluster
    speed: float
    links: float
    runs: tuple[MeasuredRun, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]

    def lines(self) -> list[str]:
        """Return sentences for people."""
        said = [f"Fitted to {len(self.runs)} runs: ranks compute at {self.speed:.3g} of the given rates"]
        said[0] += f", links reach {self.links:.3g} of theirs." if self.links != 1 else "; links as given."
        for run, before, after in zip(self.runs, self.before, self.after, strict=True):
            line = run.line or "plain data parallelism"
            said.append(
                f"  {line} on {run.ranks} ranks: measured {run.seconds:.3g} s, predicted {before:.3g} s before, "
                f"{after:.3g} s now"
            )
        return said

    def described(self) -> dict[str, Any]:
        """Return the same for programs."""
        rows = zip(self.runs, self.before, self.after, strict=True)
        return {
            "speed": self.speed,
            "links": self.links,
            "runs": [
                {"strategy": run.line, "ranks": run.ranks, "seconds": run.seconds, "before": before, "after": after}
                for run, before, after in rows
            ],
        }


def read_runs(path: Path, batch: int) -> tuple[MeasuredRun, ...]:
    """Return the runs of a JSON file.

    It is a list of objects with "ranks", "strategy" (default: ""), "batch" (default: that of the plan), and either
    "seconds" of a step or "track", a file that `unidist launch --track csv:FILE` has written, beside this one.

    Args:
        path: of the file.
        batch: samples of an update, for runs that do not say.

    Raises:
        ConfigurationError: there is no such file, or something is missing in it; says which run.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigurationError(f"--fit {path} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise ConfigurationError(f"--fit {path} is no JSON: {exc}") from exc
    if not isinstance(given, list) or not given:
        raise ConfigurationError(
            f'--fit {path}: give a list of runs: [{{"strategy": "zero=2", "ranks": 8, "seconds": 1.5}}]'
        )
    return tuple(_run(one, path, number, batch) for number, one in enumerate(given, start=1))


def _run(given: Any, path: Path, number: int, batch: int) -> MeasuredRun:
    where = f"--fit {path}, run {number}"
    known = {"strategy", "ranks", "batch", "seconds", "track"}
    if not isinstance(given, dict) or not known >= set(given):
        raise ConfigurationError(f"{where}: an object with {', '.join(sorted(known))}, not {given!r}")
    if not isinstance(given.get("ranks"), int) or given["ranks"] < 1:
        raise ConfigurationError(f'{where}: how many ranks? Give "ranks", 1 or more')
    if ("seconds" in given) is ("track" in given):
        raise ConfigurationError(f'{where}: give either "seconds" of a step, or "track", a file of --track csv:FILE')
    seconds = _tracked(path.parent / given["track"], where) if "track" in given else given["seconds"]
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ConfigurationError(f"{where}: a step of {seconds!r} seconds; give a number above 0")
    return MeasuredRun(str(given.get("strategy", "")), given["ranks"], int(given.get("batch", batch)), float(seconds))


def _tracked(path: Path, where: str) -> float:
    """Return the median seconds of a step: times between recorded points by the steps between them.

    The first interval is left out: it has compilation, and caches that are still empty.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            points = {int(row["step"]): float(row["time"]) for row in csv.DictReader(file) if row["step"]}
    except OSError as exc:
        raise ConfigurationError(f"{where}: {path} cannot be read: {exc.strerror}") from exc
    except (KeyError, ValueError) as exc:
        raise ConfigurationError(f"{where}: {path} is no file of --track csv:FILE ({exc})") from exc
    each = [(points[b] - points[a]) / (b - a) for a, b in pairwise(sorted(points)) if points[b] > points[a]]
    if len(each) < 2:
        raise ConfigurationError(f"{where}: {path} has points of {len(points)} steps; a longer run has more")
    return statistics.median(each[1:])


def fitted(runs: Sequence[MeasuredRun], problem: SearchProblem) -> Fit:
    """Return the machines with the correction that brings predictions closest to the measured times.

    One run tells how fast ranks compute. Several tell too what links reach, if exchanges take more of the time in
    some of them: then both numbers are those with the least sum of squared logarithms of predicted by measured times.

    Args:
        runs: of the model of the problem, on the same kind of machines.
        problem: model and machines.

    Raises:
        ConfigurationError: a line cannot be read or predicted, or no correction comes near.
    """

    def predictions(cluster: Cluster) -> tuple[float, ...]:
        return tuple(_predicted(run, replace(problem, cluster=cluster)) for run in runs)

    def error(speed: float, links: float) -> float:
        found = predictions(_corrected(problem.cluster, speed, links))
        return sum(math.log(seconds / run.seconds) ** 2 for seconds, run in zip(found, runs, strict=True))

    tells = len(runs) > 1 and _differ(predictions(problem.cluster), predictions(_corrected(problem.cluster, 1.0, 0.5)))
    best, width = (0.0, 0.0), math.log(_WIDEST) / 2
    for _ in range(_ROUNDS):
        offsets = [width * step / _STEPS for step in range(-_STEPS, _STEPS + 1)]
        tried = product(offsets, offsets if tells else (0.0,))
        around = best
        best = min(
            ((around[0] + a, around[1] + b) for a, b in tried),
            key=lambda point: error(math.exp(point[0]), math.exp(point[1])),
        )
        width /= 2
    speed, links = math.exp(best[0]), math.exp(best[1])
    cluster = _corrected(problem.cluster, speed, links)
    return Fit(cluster, speed, links, tuple(runs), predictions(problem.cluster), predictions(cluster))


def _differ(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether slower links change some runs more than others."""
    factors = [b / a for a, b in zip(first, second, strict=True)]
    return max(factors) > 1.02 * min(factors)


def _predicted(run: MeasuredRun, problem: SearchProblem) -> float:
    registry = problem.plugins.registry(StrategySpec)
    problem = replace(problem, work=problem.work.with_batch(run.batch), world_size=run.ranks)
    return predict(run.line, make_plan(build(run.line, registry), run.ranks, registry), problem).seconds


def _corrected(cluster: Cluster, speed: float, links: float) -> Cluster:
    def times(value: float | None) -> float | None:
        return None if value is None else value * speed

    def reached(efficiency: Efficiency) -> Efficiency:
        return Efficiency(tuple((size, part * links) for size, part in efficiency.points))

    return replace(
        cluster,
        flops=cluster.flops * speed,
        attention_flops=times(cluster.attention_flops),
        memory_bandwidth=times(cluster.memory_bandwidth),
        product_overhead=cluster.product_overhead / speed,
        efficiency_inside=reached(cluster.efficiency_inside),
        efficiency_between=reached(cluster.efficiency_between),
    )
