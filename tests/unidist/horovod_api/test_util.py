"""The small functions of `horovod.common.util`."""

from __future__ import annotations

import pytest

from unidist.horovod_api import util


@pytest.mark.parametrize(
    ("num_parts", "expected"),
    [(1, [[0, 1, 2, 3, 4]]), (2, [[0, 1, 2], [3, 4]]), (3, [[0, 1], [2, 3], [4]]), (6, [[0], [1], [2], [3], [4], []])],
)
def test_a_list_is_divided_into_neighbours(num_parts: int, expected: list[list[int]]) -> None:
    assert util.split_list([0, 1, 2, 3, 4], num_parts) == expected


def test_powers_of_two() -> None:
    assert [number for number in range(10) if util.num_rank_is_power_2(number)] == [1, 2, 4, 8]


def test_what_can_be_iterated_over() -> None:
    assert [util.is_iterable(value) for value in ([], "", range(2), {}, 3, None)] == [True] * 4 + [False] * 2


def test_a_framework_without_a_binding_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert not util.extension_available("mxnet", verbose=True)
    assert "mxnet" in capsys.readouterr().out
    with pytest.raises(ImportError, match=r"horovod\.mxnet: unidist has no 'mxnet'"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__)
