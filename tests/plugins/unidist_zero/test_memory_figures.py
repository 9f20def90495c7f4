"""The figures of ZeRO's paper, by the strategy line, and without regard to the order of strategies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from unidist.builtin.data import DataParallel
from unidist.cost_model.figures import ModelFigures, Workload
from unidist.cost_model.memory import CATEGORIES, RankMemory
from unidist.cost_model.memory_interface import EstimatesMemory
from unidist.errors import ConfigurationError
from unidist.registry import Registry
from unidist.strategy import StrategySpec
from unidist.strategy.interface import Plan, Strategy
from unidist.strategy.plan import make_plan
from unidist_planner.memory.comparison import StrategyCandidate, compare, estimate_line
from unidist_planner.memory.estimate import Estimate, estimate, plain_memory
from unidist_zero.memory_figures import offloaded, sharded

GIGA = 1e9
PAPER = Workload(ModelFigures(7_500_000_000), precision="fp16")


@dataclass(frozen=True)
class Shards(Strategy, EstimatesMemory):
    """ZeRO, as far as memory goes."""

    name: ClassVar[str] = "shards"

    stage: int
    gathered: int = 1

    def estimate(self, memory: RankMemory, workload: Workload, plan: Plan) -> RankMemory:
        return sharded(
            memory,
            stage=self.stage,
            num_ranks=plan.mesh.size("data"),
            model=workload.model,
            gathered_units=self.gathered,
        )

    @classmethod
    def alternatives(cls) -> tuple[str, ...]:
        return ("shards=1", "shards=2", "shards=3")


@dataclass(frozen=True)
class Halves(Strategy, EstimatesMemory):
    """16-bit weights and gradients with master copies, as far as memory goes."""

    name: ClassVar[str] = "halves"

    def estimate(self, memory: RankMemory, workload: Workload, plan: Plan) -> RankMemory:
        return memory.widths(parameters=2, gradients=2, master=4)


@dataclass(frozen=True)
class OneRankOnly(Strategy, EstimatesMemory):
    """Fits a single rank."""

    name: ClassVar[str] = "alone"

    def validate(self, plan: Plan) -> None:
        if plan.world_size > 1:
            raise ConfigurationError("alone is for one rank")

    def estimate(self, memory: RankMemory, workload: Workload, plan: Plan) -> RankMemory:
        return memory.moved("host", "optimizer")

    @classmethod
    def alternatives(cls) -> tuple[str, ...]:
        return ("alone",)


@pytest.fixture
def registry() -> Registry[StrategySpec]:
    found: Registry[StrategySpec] = Registry("strategy")
    found.add(StrategySpec("data", "unidist.builtin.data:DataParallel", ""))
    found.add(StrategySpec("identity", "unidist.builtin.identity:Identity", ""))
    return found


def estimated(*strategies: Strategy, workload: Workload = PAPER, ranks: int = 64) -> Estimate:
    registry: Registry[StrategySpec] = Registry("strategy")
    return estimate(workload, make_plan([*strategies, DataParallel()], ranks, registry))


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_table_of_the_paper(stage: int, gigabytes: float) -> None:
    strategies = [Shards(stage)] if stage else []
    assert round(estimated(*strategies).total() / GIGA, 1) == gigabytes


@pytest.mark.parametrize(
    ("stage", "ranks", "bytes_each"),
    [(1, 8, 4 + 12 / 8), (2, 8, 2 + 14 / 8), (3, 8, 16 / 8), (1, 1024, 4 + 12 / 1024), (3, 1, 16)],
)
def test_bytes_of_one_parameter(stage: int, ranks: int, bytes_each: float) -> None:
    total = estimated(Shards(stage), ranks=ranks).total()
    assert total / PAPER.model.parameters == pytest.approx(bytes_each, rel=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "bytes_each"), [("sgd", 4 + 4), ("momentum", 4 + 4 + 4), ("adam", 4 + 4 + 8), ("amsgrad", 20)]
)
def test_the_state_of_an_optimizer_in_float32(optimizer: str, bytes_each: float) -> None:
    workload = Workload(ModelFigures(1000), optimizer=optimizer, precision="fp32")
    assert estimated(workload=workload, ranks=1).total() == 1000 * bytes_each


def test_the_order_of_strategies_does_not_matter() -> None:
    workload = Workload(ModelFigures(1000), precision="fp32")
    one = estimated(Shards(2), Halves(), workload=workload, ranks=4)
    other = estimated(Halves(), Shards(2), workload=workload, ranks=4)
    assert one.total() == other.total() == 1000 * (2 + 14 / 4)


def test_stage_3_holds_the_units_that_it_has_gathered() -> None:
    workload = Workload(ModelFigures(1000, largest_unit=100), precision="bf16")
    found = estimated(Shards(3, gathered=2), workload=workload, ranks=4)
    assert found.bytes_of("gathered unit") == 2 * 100 * 2
    assert found.total() == 1000 * 16 / 4 + 400
    assert found.unknown == ("activations",)
    assert estimated(Shards(3), workload=workload, ranks=1).bytes_of("gathered unit") == 0


@pytest.mark.parametrize(
    ("stage", "to_host", "precision", "expected"),
    [
        (2, True, "bf16", {"device": 2 + 2 / 4, "host": 12 / 4}),
        (2, True, "fp32", {"device": 4 + 4 / 4, "host": 4 / 4 + 8 / 4}),
        (3, True, "bf16", {"device": 2 / 4, "host": 14 / 4}),
        (3, False, "bf16", {"device": 4 / 4, "file": 12 / 4}),
        (1, False, "fp32", {"device": 8, "file": 8 / 4}),
    ],
)
def test_what_is_offloaded(stage: int, to_host: bool, precision: str, expected: dict[str, float]) -> None:
    workload = Workload(ModelFigures(1000), precision=precision)
    memory = sharded(plain_memory(workload), stage=stage, num_ranks=4, model=workload.model)
    memory = offloaded(memory, to_host=to_host, stage=stage)
    found: dict[str, float] = {}
    for category in CATEGORIES:
        held = memory.holding(category)
        found[held.place] = found.get(held.place, 0) + held.bytes_each * held.share
    assert {place: each for place, each in found.items() if each} == pytest.approx(expected)


def test_gradients_that_are_reduced_in_buckets_leave_one_bucket() -> None:
    memory = sharded(plain_memory(PAPER), stage=2, num_ranks=4, model=PAPER.model, bucket_elements=1000)
    assert [(item.name, item.num_elements, item.like) for item in memory.working] == [
        ("gradient bucket", 1000, "gradients")
    ]


def test_frozen_parameters_have_neither_gradients_nor_state() -> None:
    found = estimated(workload=Workload(ModelFigures(1000, trained=10), precision="fp32"), ranks=1)
    assert found.total() == 1000 * 4 + 10 * (4 + 8)


def test_an_unknown_stage_is_an_error_that_lists_the_choices() -> None:
    with pytest.raises(ConfigurationError, match="1, 2, 3, not 4"):
        estimated(Shards(4))


@pytest.mark.parametrize(
    ("line", "ranks", "lines"),
    [
        ("", 4, ["", "shards=1", "shards=2", "shards=3"]),
        ("identity,shards=2", 4, ["identity", "shards=1,identity", "shards=2,identity", "shards=3,identity"]),
    ],
)
def test_every_combination_that_fits_is_compared(
    registry: Registry[StrategySpec], line: str, ranks: int, lines: list[str]
) -> None:
    registry.add(StrategySpec("shards", f"{__name__}:Shards", ""))
    registry.add(StrategySpec("alone", f"{__name__}:OneRankOnly", ""))
    assert [item.line for item in compare(PAPER, line, num_ranks=ranks, registry=registry)] == lines


def test_what_changes_nothing_is_not_compared(registry: Registry[StrategySpec]) -> None:
    registry.add(StrategySpec("shards", f"{__name__}:Shards", ""))
    assert [item.line for item in compare(PAPER, "", num_ranks=1, registry=registry)] == [""]


def test_lines_of_the_same_items_are_the_same() -> None:
    estimates = estimated()
    one, other = StrategyCandidate("a=1, b", estimates), StrategyCandidate("b,a=1", estimates)
    assert one.is_same_line(other)
    assert not one.is_same_line(StrategyCandidate("b,a=2", estimates))


def test_what_is_moved_away_does_not_count_for_the_device(registry: Registry[StrategySpec]) -> None:
    registry.add(StrategySpec("alone", f"{__name__}:OneRankOnly", ""))
    found = compare(PAPER, "", num_ranks=1, registry=registry)
    assert [(item.line, item.estimate.total() / GIGA) for item in found] == [("", 120), ("alone", 60)]
    assert found[1].estimate.total("host") / GIGA == 60


def test_a_strategy_that_cannot_be_loaded_is_left_out_with_a_warning(
    registry: Registry[StrategySpec], caplog: pytest.LogCaptureFixture
) -> None:
    registry.add(StrategySpec("broken", "no_such_module:Broken", ""))
    assert [item.line for item in compare(PAPER, "", num_ranks=1, registry=registry)] == [""]
    assert "broken" in caplog.text


def test_an_unknown_strategy_is_an_error(registry: Registry[StrategySpec]) -> None:
    with pytest.raises(ConfigurationError, match="shards"):
        estimate_line(PAPER, "shards=2", num_ranks=2, registry=registry)


@pytest.mark.parametrize(("stage", "each"), [(1, 2 / 4 + 2 + 12 / 4), (2, 16 / 4), (3, 16 / 4)])
def test_parameters_that_the_ranks_of_a_host_share_are_there_once(stage: int, each: float) -> None:
    model = ModelFigures(1_000_000, largest_unit=300_000)
    workload = Workload(model, precision="bf16")
    memory = sharded(plain_memory(workload), stage=stage, num_ranks=4, model=model, shared_by=4)
    assert not memory.working, "nothing is gathered"
    held = [memory.holding(name) for name in CATEGORIES]
    assert sum(item.bytes_each * item.share for item in held) == pytest.approx(each)
