"""What the tests of planning share: first-party strategies, and a cluster of papers."""

from __future__ import annotations

from typing import Any, cast

from unidist.cost_model.cluster import Cluster
from unidist.cost_model.collectives import Link
from unidist.cost_model.efficiency import Efficiency
from unidist.cost_model.step_interface import SearchProblem
from unidist.cost_model.work import ModelWork
from unidist.registry import Registry
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy import StrategySpec
from unidist.strategy.plan import build, make_plan
from unidist_planner.step_time.prediction import Prediction, predict

A100 = Cluster(
    flops=250e12,  # 80 % of the peak of 312 in 16 bits: what large matrix products reach
    ranks_per_host=8,
    inside=Link(5e-6, 250e9),
    between=Link(10e-6, 200e9),  # eight links of 200 Gbit/s
    memory_bytes=80e9,
    memory_bandwidth=2e12,
    attention_flops=125e12,
    product_overhead=8e-6,
    efficiency_between=Efficiency.constant(0.34),
)
"""Hosts as Narayanan et al. 2021 (arXiv:2104.04473, section 5) describe them; docs/published.md has the sources."""


class Plugins:
    """The registries of this installation, without strategies that have no part in planning."""

    def __init__(self) -> None:
        self._manager = PluginManager().load()
        self.strategies: Registry[StrategySpec] = Registry("strategy")
        for name in ("data", "zero", "accumulate", "activations", "pipeline", "tensor"):
            self.strategies.add(self._manager.strategies.get(name))

    def registry(self, kind: type[Any]) -> Registry[Any]:
        return self.strategies if kind is StrategySpec else self._manager.registry(kind)


def problem(work: ModelWork, world_size: int, *, cluster: Cluster = A100) -> SearchProblem:
    """Return what a search or prediction of `work` needs."""
    return SearchProblem(work, cluster, world_size, cast(PluginManager, Plugins()))


def predicted(line: str, given: SearchProblem) -> Prediction:
    """Return the prediction for a strategy line."""
    registry = given.plugins.strategies
    return predict(line, make_plan(build(line, registry), given.world_size, registry), given)
