"""GPipe, 1F1B and interleaved 1F1B: the figures of the papers, for any number of micro-batches."""

from __future__ import annotations

import pytest

from unidist.errors import ConfigurationError
from unidist_pipeline.schedules.classic import gpipe, interleaved, one_forward_one_backward, rounds_of
from unidist_pipeline.schedules.model import PipelineSize
from unidist_pipeline.simulation.costs import Costs
from unidist_pipeline.simulation.simulator import simulate

SIZES = [(1, 1), (1, 5), (2, 1), (2, 4), (3, 2), (4, 4), (4, 5), (4, 8), (5, 3), (8, 31)]


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("backward", [1.0, 2.0, 2.75])
def test_the_bubble_of_gpipe_and_1f1b_is_the_published_one(p: int, m: int, backward: float) -> None:
    for function in (gpipe, one_forward_one_backward):
        simulation = simulate(function(PipelineSize(p, m)), Costs(backward=backward))
        assert simulation.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
        assert simulation.makespan == pytest.approx((m + p - 1) * (1 + backward), abs=1e-9)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_peak_activations_are_the_published_ones(p: int, m: int) -> None:
    ahead = simulate(one_forward_one_backward(PipelineSize(p, m)))
    assert ahead.peak_activations == tuple(min(p - rank, m) for rank in range(p))
    assert simulate(gpipe(PipelineSize(p, m))).peak_activations == (m,) * p


@pytest.mark.parametrize(("p", "rounds"), [(1, 3), (2, 1), (2, 4), (4, 1), (4, 3), (6, 2)])
@pytest.mark.parametrize("v", [2, 3, 4])
def test_the_bubble_of_interleaved_is_the_published_one(p: int, rounds: int, v: int) -> None:
    m = p * rounds
    for function in (interleaved, gpipe):  # breadth first has the same bubble
        simulation = simulate(function(PipelineSize(p, m, v)))
        assert simulation.bubble_fraction == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)
    held = simulate(interleaved(PipelineSize(p, m, v))).peak_activations
    assert held == tuple(min((v - 1) * p + 2 * (p - 1 - rank) + 1, v * m) for rank in range(p))


@pytest.mark.parametrize("m", range(1, 18))
def test_interleaved_takes_any_number_of_microbatches(m: int) -> None:
    """It is never longer than 1F1B with as much work; of the formula it lacks at most what an uneven round costs."""
    p, v = 4, 2
    simulation = simulate(interleaved(PipelineSize(p, m, v)))
    plain = simulate(one_forward_one_backward(PipelineSize(p, m)), Costs(forward=v, backward=2 * v))
    assert simulation.makespan <= plain.makespan
    if m >= p:
        assert simulation.makespan <= (v * m + p - 1) * 3 + 3 * v


@pytest.mark.parametrize(("m", "p"), [(1, 4), (4, 4), (7, 4), (10, 4), (11, 3), (64, 5)])
def test_rounds_hold_every_microbatch_once_and_are_long_enough(m: int, p: int) -> None:
    rounds = rounds_of(m, p)
    assert [each for lap in rounds for each in lap] == list(range(m))
    lengths = [len(lap) for lap in rounds]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= min(p, m)


def test_a_wrong_number_of_stages_names_the_schedule_to_use() -> None:
    with pytest.raises(ConfigurationError, match="use the schedule interleaved"):
        one_forward_one_backward(PipelineSize(2, 2, 2))
    with pytest.raises(ConfigurationError, match="use the schedule 1f1b"):
        interleaved(PipelineSize(2, 2, 1))
