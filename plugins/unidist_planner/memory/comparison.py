"""Which strategies fit: the same workload under every combination that strategies propose of themselves."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass

from unidist.cost_model.figures import Workload
from unidist.cost_model.memory_interface import EstimatesMemory
from unidist.errors import ConfigurationError, PluginError
from unidist.options import parse
from unidist.registry import Registry
from unidist.strategy import StrategySpec
from unidist.strategy.plan import build, make_plan
from unidist_planner.memory.estimate import Estimate, estimate

_log = logging.getLogger("unidist")


@dataclass(frozen=True)
class StrategyCandidate:
    """A strategy line ("" is plain data parallelism) and what a rank holds with it."""

    line: str
    estimate: Estimate

    def is_same_line(self, other: StrategyCandidate) -> bool:
        """Return whether the other line has the same items, in any order."""
        return set(_items(self.line)) == set(_items(other.line))


def estimate_line(
    workload: Workload, line: str, *, num_ranks: int, registry: Registry[StrategySpec]
) -> StrategyCandidate:
    """Return the estimate for a strategy line.

    Raises:
        ConfigurationError: the line cannot be read, or does not fit the number of ranks.
    """
    return StrategyCandidate(line, estimate(workload, make_plan(build(line, registry), num_ranks, registry)))


def compare(
    workload: Workload, line: str, *, num_ranks: int, registry: Registry[StrategySpec]
) -> list[StrategyCandidate]:
    """Return the workload under each combination of what strategies propose, in the order of registration.

    Args:
        workload: model, batch and optimizer.
        line: what of it proposes nothing stays in every combination (`accumulate=4`); the rest takes turns.
        num_ranks: number of ranks. Combinations that do not fit it, or each other, are left out, and those that
            hold exactly what an earlier one holds (sharding over one rank).
        registry: of strategies. One that cannot be loaded is left out, with a warning.
    """
    choices: dict[str, tuple[str, ...]] = {}
    for spec in registry:
        try:
            cls = spec.load()
        except PluginError as exc:
            _log.warning("left out of the comparison: %s", exc)
            continue
        if issubclass(cls, EstimatesMemory) and cls.alternatives():
            choices[spec.name] = ("", *cls.alternatives())
    fixed = [item for item in _items(line) if parse(item)[0].name not in choices]
    found: list[StrategyCandidate] = []
    for combination in itertools.product(*choices.values()):
        tried = ",".join([*filter(None, combination), *fixed])
        try:
            candidate = estimate_line(workload, tried, num_ranks=num_ranks, registry=registry)
        except ConfigurationError:
            continue
        if candidate.estimate not in [item.estimate for item in found]:
            found.append(candidate)
    return found


def _items(line: str) -> list[str]:
    return [item.strip() for item in line.split(",") if item.strip()]
