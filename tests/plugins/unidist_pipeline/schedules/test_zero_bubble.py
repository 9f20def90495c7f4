"""ZB-H1 and ZB-H2: bubble and memory of Qi et al. 2023, section 2."""

from __future__ import annotations

import pytest

from unidist.errors import ConfigurationError
from unidist_pipeline.schedules.classic import one_forward_one_backward
from unidist_pipeline.schedules.model import PipelineSize
from unidist_pipeline.schedules.zero_bubble import zb_h1, zb_h2
from unidist_pipeline.simulation.costs import Costs
from unidist_pipeline.simulation.simulator import simulate


def costs(f: float, b: float, w: float) -> Costs:
    return Costs(forward=f, backward=b + w, backward_weight=w)


DURATIONS = [(1, 1, 1), (1, 1, 0.5), (1, 1.5, 1), (2, 3, 1), (1, 1.25, 0.75)]


@pytest.mark.parametrize("p", [1, 2, 4, 7])
@pytest.mark.parametrize(("f", "b", "w"), DURATIONS)
def test_the_bubble_is_the_published_one(p: int, f: float, b: float, w: float) -> None:
    size = PipelineSize(p, 3 * p)
    assert simulate(one_forward_one_backward(size), costs(f, b, w)).longest_bubble == (p - 1) * (f + b + w)
    assert simulate(zb_h1(size), costs(f, b, w)).longest_bubble == (p - 1) * (f + b - w)
    assert simulate(zb_h2(size), costs(f, b, w)).longest_bubble == (p - 1) * (f + b - 2 * w)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 9), (8, 8)])
def test_zb_h1_has_a_third_of_the_idle_time_of_1f1b_in_the_same_memory(p: int, m: int) -> None:
    plain, late = simulate(one_forward_one_backward(PipelineSize(p, m))), simulate(zb_h1(PipelineSize(p, m)))
    assert late.makespan - 3 * m == (plain.makespan - 3 * m) / 3 == p - 1
    assert max(late.peak_activations) == max(plain.peak_activations) == p


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_zb_h2_never_waits_and_holds_2p_minus_1(p: int) -> None:
    simulation = simulate(zb_h2(PipelineSize(p, 2 * p - 1)))
    assert simulation.longest_bubble == 0
    assert max(simulation.peak_activations) == 2 * p - 1


def test_less_is_held_where_the_backward_for_the_input_frees_a_part() -> None:
    whole, part = (simulate(zb_h1(PipelineSize(4, 8)), Costs(kept_for_weight=kept)) for kept in (1.0, 0.25))
    assert whole.peak_activations == (4, 4, 4, 4)
    assert part.peak_activations == (4, 3.25, 2.5, 1.75)


def test_several_stages_on_a_rank_are_refused_with_what_to_use() -> None:
    for function in (zb_h1, zb_h2):
        with pytest.raises(ConfigurationError, match="zbv and v-half"):
            function(PipelineSize(2, 4, 2))
