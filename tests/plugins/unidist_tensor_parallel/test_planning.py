"""What tensor parallelism adds to a plan: shares, exchanges, and which sizes are tried."""

from __future__ import annotations

import pytest
from planning_plugins import problem

from unidist.cost_model.step import RankStep
from unidist.cost_model.step_interface import RemainingRanks
from unidist.errors import ConfigurationError
from unidist_planner.memory.estimate import plain_memory
from unidist_planner.memory.transformer import Transformer
from unidist_planner.step_time.transformer import TransformerWork
from unidist_tensor_parallel.planning import estimated, predicted, proposed

WORK = TransformerWork(Transformer(4, 96, 1000, 32, heads=12), batch=8)


def test_a_block_is_cut_and_its_parts_added_up_twice_each_way() -> None:
    step = predicted(RankStep(), 4, problem(WORK, 4))
    assert (step.share, step.blocks) == (0.25, 1.0)
    assert step.traffic == pytest.approx((10 + 24 / 4) / 34)
    found = [(item.operation, item.moved, item.moment, item.count) for item in step.exchanges]
    assert found == [("allreduce", "border", "forward", 2), ("allreduce", "border", "backward", 2)]


def test_cut_along_the_sequence_nothing_stays_whole_and_as_much_moves() -> None:
    step = predicted(RankStep(), 4, problem(WORK, 4), cuts_sequence=True)
    assert step.traffic == 0.25
    assert {item.operation for item in step.exchanges} == {"allgather", "reducescatter"}
    memory = plain_memory(WORK.workload(1))
    assert estimated(memory, 4, cuts_sequence=True).activations.share == 0.25


def test_a_rank_holds_its_part_of_everything_but_of_the_norms_activations() -> None:
    """Korthikanti et al. 2022, equation 2: s b h (10 + 24/t + 5 a s / (h t))."""
    memory = estimated(plain_memory(WORK.workload(1)), 8)
    assert {memory.holding(name).share for name in ("parameters", "gradients", "optimizer")} == {0.125}
    assert memory.activations.share == pytest.approx((10 + 24 / 8) / 34)


def test_sizes_divide_heads_and_width_and_stay_inside_of_a_host() -> None:
    assert proposed(RemainingRanks(problem(WORK, 64), 64)) == ["tensor=2", "tensor=4"]  # of 12 heads; 8 ranks on a host
    assert proposed(RemainingRanks(problem(WORK, 6), 6)) == ["tensor=2"]  # hosts of 8: 3 and 6 would lie across them
    assert proposed(RemainingRanks(problem(WORK, 7), 7)) == []


def test_fewer_heads_than_ranks_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match="tensor=16: the model has only 12 heads"):
        predicted(RankStep(), 16, problem(WORK, 16))
