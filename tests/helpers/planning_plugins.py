"""What the tests of planning share: strategies that do nothing but take part in it, and clusters of papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from unidist.estimating.figures import Workload
from unidist.estimating.interface import EstimatesMemory
from unidist.estimating.memory import RankMemory
from unidist.planning.cluster import Cluster
from unidist.planning.collectives import Link
from unidist.planning.interface import PredictsStepTime, Room, Setting
from unidist.planning.prediction import Prediction, predict
from unidist.planning.step import RankStep
from unidist.planning.work import Work
from unidist.plugins import PluginManager
from unidist.registry import Registry, StrategyType
from unidist.strategy import Plan, Strategy
from unidist.strategy_spec import build, make_plan
from unidist_pipeline import planning as pipelines
from unidist_tensor_parallel import planning as tensors

A100 = Cluster(
    flops=250e12,  # 80 % of the peak of 312 in 16 bits: what large matrix products reach
    ranks_per_host=8,
    inside=Link(5e-6, 250e9),
    between=Link(10e-6, 200e9),  # eight links of 200 Gbit/s
    memory_bytes=80e9,
    memory_bandwidth=2e12,
)
"""Hosts as Narayanan et al. 2021 (arXiv:2104.04473, section 5) describe them; figures of their makers."""


@dataclass(frozen=True)
class Stages(Strategy, EstimatesMemory, PredictsStepTime):
    """A pipeline, as far as planning goes."""

    name: ClassVar[str] = "pipeline"
    axis: ClassVar[str | None] = "pipeline"
    axis_order: ClassVar[int] = 0

    size: int
    schedule: str = "1f1b"
    microbatches: int = 1

    @property
    def axis_size(self) -> int | None:
        return self.size

    @property
    def pipe(self) -> pipelines.Pipe:
        return pipelines.Pipe(self.schedule, self.size, self.microbatches)

    def estimate(self, memory: RankMemory, workload: Workload, plan: Plan) -> RankMemory:
        return pipelines.estimated(memory, workload, self.pipe)

    def predict(self, step: RankStep, plan: Plan, setting: Setting) -> RankStep:
        return pipelines.predicted(step, self.pipe, setting)

    @classmethod
    def proposals(cls, room: Room) -> Sequence[str]:
        return pipelines.proposed(room)


@dataclass(frozen=True)
class Cut(Strategy, EstimatesMemory, PredictsStepTime):
    """Tensor parallelism, as far as planning goes."""

    name: ClassVar[str] = "tensor"
    axis: ClassVar[str | None] = "tensor"
    axis_order: ClassVar[int] = 100

    size: int

    @property
    def axis_size(self) -> int | None:
        return self.size

    def estimate(self, memory: RankMemory, workload: Workload, plan: Plan) -> RankMemory:
        return tensors.estimated(memory, self.size)

    def predict(self, step: RankStep, plan: Plan, setting: Setting) -> RankStep:
        return tensors.predicted(step, self.size, setting)

    @classmethod
    def proposals(cls, room: Room) -> Sequence[str]:
        return tensors.proposed(room)


class Plugins:
    """The registries of this installation, with the strategies above, and without what has no part in planning."""

    def __init__(self) -> None:
        manager = PluginManager().load()
        self.schedules = manager.schedules
        self.strategies: Registry[StrategyType] = Registry("strategy")
        for name in ("data", "zero", "accumulate", "activations"):
            self.strategies.add(manager.strategies.get(name))
        for cls in (Stages, Cut):
            self.strategies.add(StrategyType(cls.name, f"{__name__}:{cls.__name__}", "for tests"))


def setting(work: Work, world_size: int, *, cluster: Cluster = A100) -> Setting:
    """Return what a search or prediction of `work` needs."""
    return Setting(work, cluster, world_size, cast(PluginManager, Plugins()))


def predicted(line: str, given: Setting) -> Prediction:
    """Return the prediction for a strategy line."""
    registry = given.plugins.strategies
    return predict(line, make_plan(build(line, registry), given.world_size, registry), given)
