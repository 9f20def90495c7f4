"""The forms and the steps by which optimizers are tried."""

from __future__ import annotations

from math import prod

import pytest

from unidist.optim.trial import LARGE, LATE_STEP, late_steps, step_counters, trial_shape, trial_shapes, uneven_middle


@pytest.mark.parametrize(
    ("shape", "small"),
    [
        ((), ()),
        ((768,), (768,)),
        ((100_000,), (LARGE * LARGE,)),
        ((50_257, 768), (LARGE, LARGE)),
        ((768, 3072), (LARGE, LARGE)),
        ((50_257, 4), (6400, 4)),
        ((4, 6), (4, 6)),
        ((512, 256, 3, 3), (LARGE, LARGE, 2, 2)),
        ((64, 3, 7, 7), (64, 3, 7, 7)),
        ((40, 40, 40), (40, 40, 16)),
        ((1, 1, 4096), (1, 1, 4096)),
    ],
)
def test_a_small_shape_has_as_many_dims_and_enough_elements(shape: tuple[int, ...], small: tuple[int, ...]) -> None:
    assert trial_shape(shape) == small
    assert prod(small) >= min(prod(shape), LARGE * LARGE)


def test_each_form_is_tried_once_and_empty_ones_never() -> None:
    assert trial_shapes([(768, 768), (3072, 768), (768,), (0, 5), (768,)]) == [(LARGE, LARGE), (768,)]
    assert trial_shapes([(0,)]) == [(4, 6)]


def test_a_tensor_is_cut_in_two_parts_of_which_one_may_be_empty() -> None:
    assert [uneven_middle(count) for count in (0, 1, 2, 3, 4, 24, 25_600)] == [0, 0, 1, 1, 1, 11, 12_799]


def test_what_rises_by_one_at_most_counts() -> None:
    records = [
        {"step": 1.0, "every second": 0.0, "rate": 0.1, "same": 3.0, "in a round": 1.0, "sum": 1.0},
        {"step": 2.0, "every second": 1.0, "rate": 1.1, "same": 3.0, "in a round": 2.0, "sum": 3.0},
        {"step": 3.0, "every second": 1.0, "rate": 0.3, "same": 3.0, "in a round": 0.0, "sum": 6.0, "new": 1.0},
    ]
    assert step_counters(records) == {"step", "every second"}
    assert step_counters([]) == set()


def test_whole_numbers_among_the_options_say_when_to_try_again() -> None:
    assert late_steps([0.9, True, None, 2, 25, 25, "x", 10**9]) == [23, LATE_STEP - 2]
    assert all(LATE_STEP % every == 0 for every in (*range(1, 11), 16, 20, 25, 50, 64, 100, 128, 200, 500, 1000))
