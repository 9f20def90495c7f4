"""ZB-1p and ZB-2p: the published bubble rates, closed forms, and the memory limit."""

from __future__ import annotations

import pytest

from unidist.errors import ConfigurationError
from unidist.registry import Registry
from unidist.runtime.plugin_manager import PluginManager
from unidist_pipeline.schedules.catalog import build_schedule
from unidist_pipeline.schedules.classic import one_forward_one_backward
from unidist_pipeline.schedules.model import PipelineSize, Schedule, StageTimes
from unidist_pipeline.schedules.registration import ScheduleSpec
from unidist_pipeline.schedules.searched import zb_1p, zb_2p
from unidist_pipeline.schedules.zero_bubble import zb_h1
from unidist_pipeline.simulation.costs import Costs
from unidist_pipeline.simulation.simulator import Simulation, simulate

KEPT_1_5B, KEPT_6_2B = 0.366, 0.432
"""32 h / (34 h + 5 a s), their section 2.1, for hidden sizes of 2304 and 4096, 24 and 32 heads, 1024 tokens."""

# Qi et al. 2024, Table 9 (T_F, T_B, T_W, T_comm in ms) and Table 5 (rates of ZB-1p and ZB-2p), for 8 ranks.
PUBLISHED = [
    (24, StageTimes(18.522, 18.086, 9.337, 0.601, KEPT_1_5B), 0.1585, 0.0433),
    (32, StageTimes(18.513, 18.086, 9.331, 0.626, KEPT_1_5B), 0.1242, 0.0039),
    (64, StageTimes(18.546, 18.097, 9.321, 0.762, KEPT_1_5B), 0.0674, 0.0026),
    (24, StageTimes(29.718, 29.444, 19.927, 0.527, KEPT_6_2B), 0.1323, 0.0029),
    (32, StageTimes(29.802, 29.428, 19.530, 0.577, KEPT_6_2B), 0.1045, 0.0022),
    (64, StageTimes(29.935, 29.621, 19.388, 0.535, KEPT_6_2B), 0.0554, 0.0010),
]


def simulated(schedule: Schedule, times: StageTimes) -> Simulation:
    costs = Costs(
        forward=times.forward,
        backward=times.backward_input + times.backward_weight,
        backward_weight=times.backward_weight,
        message=times.message,
        kept_for_weight=times.kept_for_weight,
    )
    return simulate(schedule, costs)


def rate(found: Simulation, num_microbatches: int, times: StageTimes) -> float:
    """Return the bubble rate as the paper has it: cost is the longest span of a rank."""
    cost = max(found.spans)
    return 1 - num_microbatches * (times.forward + times.backward_input + times.backward_weight) / cost


@pytest.mark.parametrize(("num_microbatches", "times", "of_1p", "of_2p"), PUBLISHED)
def test_the_bubble_rates_are_the_published_ones(
    num_microbatches: int, times: StageTimes, of_1p: float, of_2p: float
) -> None:
    size = PipelineSize(8, num_microbatches, times=times)
    small, large = (simulated(function(size), times) for function in (zb_1p, zb_2p))
    assert round(rate(small, num_microbatches, times), 4) == of_1p
    assert round(rate(large, num_microbatches, times), 4) == of_2p
    assert max(small.peak_activations) <= 8
    assert max(large.peak_activations) <= 16


def test_zb_1p_is_as_good_as_the_schedule_by_hand_without_counting_on_freed_memory() -> None:
    for num_microbatches, given, _, _ in PUBLISHED:
        times = StageTimes(given.forward, given.backward_input, given.backward_weight, given.message)
        size = PipelineSize(8, num_microbatches, times=times)
        ours, by_hand = (max(simulated(function(size), times).spans) for function in (zb_1p, zb_h1))
        assert ours == pytest.approx(by_hand)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (4, 2), (4, 4), (8, 5)])
@pytest.mark.parametrize(("f", "b", "w"), [(1, 1, 1), (2, 3, 1), (1, 1.25, 0.75)])
def test_few_microbatches_take_the_time_of_the_closed_forms(p: int, m: int, f: float, b: float, w: float) -> None:
    """Their appendix H: with m <= p, 1F1B takes (m+p-1)(F+B+W), zero-bubble schedules (m+p-1)(F+B)+W."""
    times = StageTimes(f, b, w)
    size = PipelineSize(p, m, times=times)
    assert simulated(one_forward_one_backward(size), times).makespan == pytest.approx((m + p - 1) * (f + b + w))
    for function in (zb_1p, zb_2p):
        assert simulated(function(size), times).makespan == pytest.approx((m + p - 1) * (f + b) + w)


@pytest.mark.parametrize("limit", [3, 4, 6.5, 11])
@pytest.mark.parametrize("kept", [1.0, 0.4])
def test_no_rank_holds_more_than_the_limit(limit: float, kept: float) -> None:
    times = StageTimes(2, 2.5, 1.5, 0.1, kept)
    found = simulated(zb_2p(PipelineSize(6, 20, times=times, limit=limit)), times)
    assert limit - 1 < max(found.peak_activations) <= limit + 1e-9  # and what is allowed is used


@pytest.mark.parametrize("p", [2, 5, 8])
def test_twice_the_memory_halves_the_idle_time_and_freed_memory_takes_nearly_all_of_it(p: int) -> None:
    idle = []
    for function, kept in ((zb_1p, 1.0), (zb_2p, 1.0), (zb_2p, 0.4)):
        times = StageTimes(2, 2, 1, 0.05, kept)
        idle.append(simulated(function(PipelineSize(p, 4 * p, times=times)), times).longest_bubble)
    assert idle[1] < 0.75 * idle[0]
    assert idle[2] < 0.25 * idle[0]


def test_a_limit_that_nothing_fits_and_several_stages_are_errors() -> None:
    with pytest.raises(ConfigurationError, match=r"limit=0\.5: a rank holds 1 micro-batch or more"):
        PipelineSize(2, 4, limit=0.5)
    for function in (zb_1p, zb_2p):
        with pytest.raises(ConfigurationError, match="zbv and v-half have two"):
            function(PipelineSize(2, 4, 2))


def test_times_and_limit_are_for_searched_schedules() -> None:
    registry: Registry[ScheduleSpec] = PluginManager().load().registry(ScheduleSpec)
    found = build_schedule("zb-2p", registry, num_ranks=4, num_microbatches=9, limit=5)
    assert max(simulate(found).peak_activations) <= 5
    with pytest.raises(ConfigurationError, match=r"'1f1b' is always the same; .* searched: zb-1p, zb-2p"):
        build_schedule("1f1b", registry, num_ranks=4, num_microbatches=9, limit=5)
    with pytest.raises(ConfigurationError, match="always the same"):
        build_schedule("zb-h1", registry, num_ranks=4, num_microbatches=9, times=StageTimes())


@pytest.mark.parametrize("wrong", [{"forward": -1}, {"message": float("inf")}, {"kept_for_weight": 1.5}])
def test_times_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        StageTimes(**wrong)
