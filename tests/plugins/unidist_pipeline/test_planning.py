"""What a pipeline adds to a plan: continued from small simulations, it is what the whole simulation says."""

from __future__ import annotations

import pytest
from planning_plugins import problem

from unidist.cost_model.step import RankStep
from unidist.cost_model.step_interface import RemainingRanks
from unidist.errors import ConfigurationError
from unidist.runtime.plugin_manager import PluginManager
from unidist_pipeline.planning import (
    LARGEST,
    MOST,
    Pipe,
    Played,
    held_microbatches,
    idle_microbatches,
    predicted,
    proposed,
)
from unidist_pipeline.schedules.catalog import build_schedule
from unidist_pipeline.schedules.registration import ScheduleSpec
from unidist_pipeline.simulation.costs import Costs
from unidist_pipeline.simulation.simulator import Simulation, simulate
from unidist_planner.memory.transformer import Transformer
from unidist_planner.step_time.transformer import TransformerWork

SCHEDULES = PluginManager().load().registry(ScheduleSpec)
THIRD = 1 / 3
WORK = TransformerWork(Transformer(24, 512, 1000, 128, heads=8), batch=48)


def simulated(pipe: Pipe, message: float = 0.0) -> Simulation:
    stages = pipe.stages(SCHEDULES)
    schedule = build_schedule(
        pipe.schedule,
        SCHEDULES,
        num_ranks=pipe.num_ranks,
        num_microbatches=pipe.num_microbatches,
        stages_per_rank=stages,
    )
    costs = Costs(THIRD / stages, 2 * THIRD / stages, THIRD / stages, message=message, activation=1 / stages)
    return simulate(schedule, costs)


@pytest.mark.parametrize(
    "name", ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipev", "v-half", "v-min"]
)
@pytest.mark.parametrize(("ranks", "pieces"), [(4, 4), (8, 32), (12, 50)])
def test_small_pipelines_are_simulated_and_large_ones_come_near(name: str, ranks: int, pieces: int) -> None:
    pipe = Pipe(name, ranks, pieces)
    whole = simulated(pipe)
    total = pieces + idle_microbatches(pipe, SCHEDULES, THIRD, 0.0)
    held = held_microbatches(pipe, SCHEDULES)
    if ranks <= LARGEST and pieces <= MOST * ranks:
        assert total == pytest.approx(whole.makespan)
        assert held == pytest.approx(max(whole.peak_activations))
    else:
        assert total == pytest.approx(whole.makespan, rel=0.005)
        assert 0.97 * max(whole.peak_activations) <= held <= 1.34 * max(whole.peak_activations)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("ranks", "pieces"), [(2, 1000), (64, 64), (64, 512), (1000, 10000)])
def test_gpipe_and_1f1b_are_exact_at_any_size(name: str, ranks: int, pieces: int) -> None:
    """(p-1)/m of the computing time, and p or m micro-batches held."""
    pipe = Pipe(name, ranks, pieces)
    assert idle_microbatches(pipe, SCHEDULES, THIRD, 0.0) == pytest.approx(ranks - 1)
    assert held_microbatches(pipe, SCHEDULES) == pytest.approx(min(ranks, pieces) if name == "1f1b" else pieces)


def test_messages_that_a_small_pipeline_waits_for_a_large_one_waits_for_too() -> None:
    pipe = Pipe("1f1b", 16, 128)
    found = 128 + idle_microbatches(pipe, SCHEDULES, THIRD, 0.05)
    assert found == pytest.approx(simulated(pipe, message=0.05).makespan, rel=0.03)
    assert found > 128 + 15


def test_seconds_are_in_proportion_and_never_below_the_bound() -> None:
    for name in ("1f1b", "interleaved", "zbv", "v-min", "zb-h2"):
        order = Played(Pipe(name, 4, 8), SCHEDULES)
        one = order.seconds(8, 0.1, 0.2, 0.001)
        assert order.seconds(8, 1.0, 2.0, 0.01) == pytest.approx(10 * one)
        assert one >= order.at_least(8, 0.1, 0.2) > 8 * 0.3
    assert Played(Pipe("1f1b", 4, 8), SCHEDULES).seconds(8, 0.0, 0.0, 1.0) == 0.0


def test_a_step_gets_the_share_of_its_stages() -> None:
    step = predicted(RankStep(), Pipe("1f1b", 4, 6), problem(WORK, 4))
    assert (step.share, step.blocks, step.traffic, step.num_pieces, step.passes) == (0.25, 0.25, 0.25, 6, 1)


def test_a_schedule_that_there_is_not_lists_the_choices() -> None:
    with pytest.raises(ConfigurationError, match=r"2f2b.*1f1b"):
        predicted(RankStep(), Pipe("2f2b", 4, 6), problem(WORK, 4))


def test_proposals_divide_ranks_blocks_and_batch() -> None:
    found = proposed(RemainingRanks(problem(WORK, 16), 16))
    assert "pipeline=4:schedule=1f1b:microbatches=12" in found
    sizes = {item.partition(":")[0] for item in found}
    assert sizes == {"pipeline=2", "pipeline=4", "pipeline=8"}  # 16 does not divide 24 blocks
    assert not any("pipeline=8:schedule=interleaved" in item for item in found)  # 16 stages do not either
    counts = {int(item.rpartition("=")[2]) for item in found if item.startswith("pipeline=4:schedule=1f1b")}
    assert counts == {4, 6, 12}  # of 12 samples; with fewer than 4 most of the ranks would wait


def test_with_few_samples_there_is_still_a_proposal() -> None:
    work = TransformerWork(Transformer(24, 512, 1000, 128, heads=8), batch=2)
    found = proposed(RemainingRanks(problem(work, 4), 4))
    assert "pipeline=4:schedule=1f1b:microbatches=2" in found
