"""What a script asks of an exchange: which ranks, which groups, and refusing what is not honoured."""

from __future__ import annotations

from typing import Any

import pytest

from unidist.builtin.uncompressed import NoCompression
from unidist.errors import ConfigurationError, UsageError
from unidist.gradients.options import ExchangeOptions


def test_a_number_of_groups_divides_the_parameters_evenly_and_in_order() -> None:
    assert ExchangeOptions(groups=2).group_numbers([0, 1, 3, 4, 9]) == {0: 0, 1: 0, 3: 0, 4: 1, 9: 1}
    assert ExchangeOptions(groups=5).group_numbers([3, 7]) == {3: 0, 7: 2}
    assert ExchangeOptions().group_numbers([0, 1]) == {}


def test_groups_by_position_leave_the_others_out() -> None:
    assert ExchangeOptions(groups=((1, 4), (2,))).group_numbers([0, 1, 2, 3, 4]) == {1: 0, 4: 0, 2: 1}


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_a_factor_that_divides_nothing_is_refused(factor: float) -> None:
    with pytest.raises(UsageError, match="above 0"):
        ExchangeOptions(predivide_factor=factor)


def test_an_owner_refuses_what_it_does_not_honour() -> None:
    ExchangeOptions(groups=3, sparse_as_dense=True).check_supported_by("mine")
    members: Any = object()
    options = ExchangeOptions(compressor=NoCompression(), predivide_factor=2.0, process_set=members)
    with pytest.raises(
        ConfigurationError, match="a compression, a process set, a predivide factor, which strategy 'mine'"
    ):
        options.check_supported_by("mine")
