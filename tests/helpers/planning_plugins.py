"""What the tests of planning share: first-party strategies, and a cluster of papers."""

from __future__ import annotations

from typing import cast

from unidist.cost_model.step_interface import Setting
from unidist.registry import Registry, StrategyType
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy.plan import build, make_plan
from unidist_planner.step_time.cluster import Cluster
from unidist_planner.step_time.collectives import Link
from unidist_planner.step_time.prediction import Prediction, predict
from unidist_planner.step_time.work import Work

A100 = Cluster(
    flops=250e12,  # 80 % of the peak of 312 in 16 bits: what large matrix products reach
    ranks_per_host=8,
    inside=Link(5e-6, 250e9),
    between=Link(10e-6, 200e9),  # eight links of 200 Gbit/s
    memory_bytes=80e9,
    memory_bandwidth=2e12,
)
"""Hosts as Narayanan et al. 2021 (arXiv:2104.04473, section 5) describe them; figures of their makers."""


class Plugins:
    """The registries of this installation, without strategies that have no part in planning."""

    def __init__(self) -> None:
        manager = PluginManager().load()
        self.schedules = manager.schedules
        self.strategies: Registry[StrategyType] = Registry("strategy")
        for name in ("data", "zero", "accumulate", "activations", "pipeline", "tensor"):
            self.strategies.add(manager.strategies.get(name))


def setting(work: Work, world_size: int, *, cluster: Cluster = A100) -> Setting:
    """Return what a search or prediction of `work` needs."""
    return Setting(work, cluster, world_size, cast(PluginManager, Plugins()))


def predicted(line: str, given: Setting) -> Prediction:
    """Return the prediction for a strategy line."""
    registry = given.plugins.strategies
    return predict(line, make_plan(build(line, registry), given.world_size, registry), given)
