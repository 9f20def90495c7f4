"""Schedules in a V: idle time and memory, against 1F1B with the same stages."""

from __future__ import annotations

import pytest

from unidist.errors import ConfigurationError
from unidist_pipeline.schedules.model import PipelineSize
from unidist_pipeline.schedules.v_shape import v_half, v_min, zbv
from unidist_pipeline.simulation.simulator import Simulation, simulate


def simulated(function: object, p: int, m: int) -> Simulation:
    assert callable(function)
    return simulate(function(PipelineSize(p, m, 2)))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
def test_zbv_never_waits_and_holds_as_much_as_1f1b(p: int) -> None:
    simulation = simulated(zbv, p, 2 * p)
    assert simulation.longest_bubble == 0
    assert simulation.makespan == 6 * 2 * p + p - 1  # only that the last rank begins p - 1 later
    assert set(simulation.peak_activations) == {2 * p}


@pytest.mark.parametrize("p", [4, 5, 8, 11])
def test_v_half_has_half_of_both(p: int) -> None:
    for m in (2 * p, 3 * p):  # idle time does not grow with the micro-batches
        simulation = simulated(v_half, p, m)
        assert simulation.makespan - 6 * m == simulation.longest_bubble == 3 * p - 4 + p % 2
        assert max(simulation.peak_activations) == p + 3


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8, 10])
def test_v_min_has_two_thirds_of_the_idle_time_and_a_third_of_the_memory(p: int) -> None:
    for m in (2 * p, 3 * p):
        simulation = simulated(v_min, p, m)
        assert simulation.makespan - 6 * m == simulation.longest_bubble == 4 * p - 5 + (p % 3 == 0)
        assert max(simulation.peak_activations) == 2 * ((p + 4) // 3)


@pytest.mark.parametrize("function", [v_half, v_min])
def test_no_two_actions_fall_on_the_same_time_on_many_ranks(function: object) -> None:
    for p in range(1, 40):
        assert callable(function)
        function(PipelineSize(p, 1, 2))  # an assertion in it says otherwise


@pytest.mark.parametrize("function", [zbv, v_half, v_min])
@pytest.mark.parametrize("stages", [1, 3])
def test_another_number_of_stages_is_refused(function: object, stages: int) -> None:
    assert callable(function)
    with pytest.raises(ConfigurationError, match=f"two stages on each rank, not {stages}"):
        function(PipelineSize(2, 4, stages))
