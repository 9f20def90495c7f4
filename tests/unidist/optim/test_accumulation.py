"""Windows: which backward passes make one update."""

from __future__ import annotations

import pytest

from unidist.errors import UsageError
from unidist.optim.accumulation import Accumulation, Window


def window(accumulation: Accumulation | None = None) -> Window:
    made = Window(accumulation or Accumulation())
    made.add_parameters(2)
    return made


def test_less_than_one_pass_is_refused() -> None:
    with pytest.raises(UsageError, match="0 backward passes"):
        Accumulation(0)


def test_stepwise_the_calls_of_step_count() -> None:
    passes = window(Accumulation(3))
    seen = []
    for _ in range(3):
        passes.count_pass(0, "weight")
        passes.count_pass(0, "weight")  # of a parameter that the pass uses twice
        seen.append((passes.is_last_pass(0), passes.completes, passes.count_step(), passes.is_open))
    assert seen == [(False, False, False, True), (False, False, False, True), (True, True, True, True)]
    passes.reset()
    assert (passes.is_open, passes.has_passes(0), passes.is_last_pass(0)) == (False, False, False)


def test_horovods_way_the_passes_of_each_parameter_count() -> None:
    passes = window(Accumulation(2, stepwise=False))
    assert passes.completes
    passes.count_pass(0, "weight")
    assert [passes.is_last_pass(index) for index in (0, 1)] == [True, False]
    assert [passes.has_passes(index) for index in (0, 1)] == [True, False]
    assert passes.count_step()
    assert not passes.is_open


def test_the_most_passes_of_any_parameter_are_those_that_there_were() -> None:
    passes = window(Accumulation(4))
    assert passes.num_passes == 0
    passes.count_pass(1, "weight")
    passes.count_pass(1, "weight")
    assert passes.num_passes == 2
    stepped = window(Accumulation(4))
    stepped.count_step()
    assert stepped.num_passes == 1
    assert Window(Accumulation()).num_passes == 0


@pytest.mark.parametrize(("passes", "kept"), [(1, False), (2, True)])
def test_after_the_exchange_another_pass_is_a_round_of_its_own_where_one_makes_an_update(
    passes: int, kept: bool
) -> None:
    made = window(Accumulation(passes))
    made.in_round = True
    made.count_pass(0, "weight")
    made.finish_round()
    assert (made.in_round, made.finished, made.has_passes(0)) == (False, True, kept)


def test_a_pass_after_the_exchange_begins_a_round_of_its_own_or_is_one_too_many() -> None:
    alone, several = window(), window(Accumulation(2, stepwise=False))
    for made in (alone, several):
        made.finish_round()
    alone.count_pass(0, "weight")
    assert not alone.finished
    with pytest.raises(UsageError, match="reached 'weight', but the window of 2 passes is complete"):
        several.count_pass(0, "weight")


def test_parameters_that_come_later_have_no_passes() -> None:
    passes = window()
    passes.count_pass(1, "weight")
    passes.add_parameters(1)
    assert [passes.has_passes(index) for index in range(3)] == [False, True, False]


def test_passes_are_counted_in_another_way_from_the_next_window_on() -> None:
    passes = window(Accumulation(3))
    passes.count_step()
    passes.change(Accumulation(2))
    assert not passes.is_open
    assert [passes.count_step(), passes.count_step()] == [False, True]
