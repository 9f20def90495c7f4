"""Which rank holds which experts, and how many tokens an expert takes."""

from __future__ import annotations

import pytest

from unidist.errors import ConfigurationError
from unidist_expert_parallel.layout.capacity import capacity
from unidist_expert_parallel.layout.owners import check_division, held_experts


def test_every_expert_is_on_one_rank() -> None:
    assert [list(held_experts(6, rank, 3)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_ranks_that_do_not_divide_the_experts_of_every_layer_are_refused() -> None:
    check_division({"a": 8, "b": 12}, 4)
    with pytest.raises(ConfigurationError, match=r"the 12 experts of 'b' .* 8 ranks; choices: expert=1, expert=2, exp"):
        check_division({"a": 8, "b": 12}, 8)
    with pytest.raises(ConfigurationError, match="do not divide over 16 ranks"):
        check_division({"a": 8}, 16)


def test_capacity_is_the_even_share_times_the_factor_rounded_up() -> None:
    assert capacity(10, 4, 2, 1.0) == 5
    assert capacity(10, 4, 1, 1.25) == 4
    assert capacity(1, 64, 1, 0.1) == 1
