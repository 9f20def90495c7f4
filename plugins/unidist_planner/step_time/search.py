"""Tries what strategies propose, and finds the divisions of the work over ranks that take least time.

Depth first over the strategies, the innermost axis first: each proposes for what those before it have left over. What
does not go together is left out at once, what does not fit into memory when it is complete; of the others only those
are played through whose lower bound is below the best five found so far. So ten thousand ranks take seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unidist.cost_model.memory_interface import EstimatesMemory
from unidist.cost_model.step_interface import PredictsStepTime, RemainingRanks, SearchProblem
from unidist.errors import ConfigurationError, PluginError
from unidist.mesh import DATA_AXIS, SAMPLE_AXES
from unidist.options import parse
from unidist.registry import Registry
from unidist.strategy import StrategySpec
from unidist.strategy.interface import Plan, Strategy
from unidist.strategy.plan import build, make_plan
from unidist_planner.step_time.prediction import Outline, Prediction, outline, step_of

_Division = tuple[tuple[str, int], ...]
_EQUAL = 1.01
"""More than the factor by which times can differ that are equal to three digits."""

_log = logging.getLogger("unidist")


@dataclass(frozen=True)
class Found:
    """Result of a search.

    Args:
        best: that fit, the fastest first; of each division of the ranks (sizes of the mesh) the best line only.
        misses: that do not fit and would be faster than the best one, or if nothing fits those that need least
            memory; likewise one of each division.
        num_tried: divisions and lines that were looked at.
        num_fitting: how many of them fit.
    """

    best: tuple[Prediction, ...]
    misses: tuple[Prediction, ...]
    num_tried: int
    num_fitting: int


def search(problem: SearchProblem, fixed: str = "", *, num_best: int = 5, num_misses: int = 3) -> Found:
    """Return the best divisions of the work.

    Args:
        problem: model, machines, plugins.
        fixed: strategy line that stays in every division; what it names does not take turns.
        num_best: how many to return.
        num_misses: likewise of those that do not fit.

    Raises:
        ConfigurationError: the fixed line cannot be read, or fits no division.
    """
    limit = problem.cluster.memory_bytes
    candidates = _Candidates(problem, fixed)
    outlines = list(candidates)
    if not outlines:
        make_plan(
            build(fixed, problem.plugins.registry(StrategySpec)),
            problem.world_size,
            problem.plugins.registry(StrategySpec),
        )
        raise ConfigurationError(
            f"no division of {problem.world_size} ranks goes together with a batch of {problem.work.batch} samples"
            + (f" and {fixed!r}" if fixed else "")
            + f". The first one that was tried: {candidates.refusal}"
        )
    fitting = [item for item in outlines if limit is None or item.estimate.total() <= limit]
    best = _fastest(fitting, num_best)
    if best:
        too_large = [item for item in outlines if limit is not None and item.estimate.total() > limit]
        misses = _fastest([item for item in too_large if item.at_least < best[0].seconds], num_misses)
        misses = tuple(item for item in misses if item.seconds < best[0].seconds)
    else:
        smallest: dict[_Division, Outline] = {}
        for item in sorted(outlines, key=lambda item: item.estimate.total()):
            smallest.setdefault(_division(item.plan), item)
        misses = tuple(item.finished() for item in list(smallest.values())[:num_misses])
    return Found(best, misses, len(outlines), len(fitting))


def _fastest(outlines: Sequence[Outline], wanted: int) -> tuple[Prediction, ...]:
    """Return the fastest of each division. What cannot be among them by its lower bound is not played through."""
    best: dict[_Division, Prediction] = {}
    for item in sorted(outlines, key=_by_bound):
        leading = sorted(best.values(), key=_by_time)[:wanted]
        if len(leading) == wanted and item.at_least > leading[-1].seconds * _EQUAL:
            break
        division = _division(item.plan)
        if division in best and _by_bound(item) >= _by_time(best[division]):
            continue
        found = item.finished()
        if division not in best or _by_time(found) < _by_time(best[division]):
            best[division] = found
    return tuple(sorted(best.values(), key=_by_time)[:wanted])


def _by_bound(item: Outline) -> tuple[float, int, float]:
    return _rounded(item.at_least), item.line.count(","), item.exchanging


def _by_time(item: Prediction) -> tuple[float, int, float]:
    """Of equally fast ones the line with fewest strategies, then the one that exchanges least, is better."""
    return _rounded(item.seconds), item.line.count(","), item.exchanging


def _rounded(seconds: float) -> float:
    """Return the time to three digits: what differs by less is taken to be equally fast."""
    return float(f"{seconds:.2e}")


def _division(plan: Plan) -> _Division:
    return tuple(sorted((name, size) for name, size in plan.mesh.axes.items() if size > 1))


class _Candidates:
    """All divisions that go together, with what they cost."""

    def __init__(self, problem: SearchProblem, fixed: str) -> None:
        self._problem = problem
        self._registry: Registry[StrategySpec] = problem.plugins.registry(StrategySpec)
        self._fixed = build(fixed, self._registry)
        self._fixed_line = fixed
        self._built: dict[str, Strategy] = {}
        self._last: tuple[Plan | None, int | None] = (None, None)
        self.refusal = ""
        """Why the first division was left out that its strategies accept."""
        taken = {request.name for request in parse(fixed)}
        self._choosers = sorted(
            (cls for name, cls in self._classes() if name not in taken),
            key=lambda cls: (cls.axis is None, -cls.axis_order),  # the innermost axis first; those without one last
        )

    def _classes(self) -> Iterator[tuple[str, type[Strategy]]]:
        for spec in self._registry:
            try:
                cls = spec.load()
            except PluginError as exc:
                _log.warning("left out of the plan: %s", exc)
                continue
            if issubclass(cls, PredictsStepTime | EstimatesMemory):
                yield spec.name, cls

    def __iter__(self) -> Iterator[Outline]:
        plan = self._plan(())
        if plan is not None:
            yield from self._below(0, (), plan)

    def _below(self, level: int, chosen: tuple[str, ...], plan: Plan) -> Iterator[Outline]:
        if level == len(self._choosers):
            line = ",".join([*chosen, *filter(None, [self._fixed_line])])
            try:
                yield outline(line, plan, self._problem)
            except ConfigurationError as exc:
                self.refusal = self.refusal or str(exc)
            return
        yield from self._below(level + 1, chosen, plan)
        for item in self._proposals(self._choosers[level], plan):
            more = self._plan((*chosen, item))
            if more is not None:
                yield from self._below(level + 1, (*chosen, item), more)

    def _proposals(self, cls: type[Strategy], plan: Plan) -> Sequence[str]:
        if issubclass(cls, PredictsStepTime):
            num_pieces = self._pieces(plan)
            if num_pieces is None:
                return ()
            ranks = plan.mesh.size(DATA_AXIS)
            others = plan.mesh.size(SAMPLE_AXES) // ranks
            return cls.proposals(RemainingRanks(self._problem, ranks, num_pieces, others))
        return cls.alternatives() if issubclass(cls, EstimatesMemory) else ()

    def _pieces(self, plan: Plan) -> int | None:
        """Return the pieces of a rank's batch; None if the plan's strategies do not accept the model."""
        if plan is not self._last[0]:
            try:
                self._last = plan, step_of(plan, self._problem).num_pieces
            except ConfigurationError:
                self._last = plan, None
        return self._last[1]

    def _plan(self, chosen: Sequence[str]) -> Plan | None:
        """Return the plan of what is chosen so far, None if it does not go together."""
        try:
            strategies = [self._object(item) for item in chosen]
            return make_plan([*strategies, *self._fixed], self._problem.world_size, self._registry)
        except ConfigurationError:
            return None

    def _object(self, item: str) -> Strategy:
        if item not in self._built:
            (self._built[item],) = build(item, self._registry)
        return self._built[item]
