"""The small functions of `horovod.common.util`."""

from __future__ import annotations

import os

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


def test_variables_are_set_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIDIST_TEST_SET", "before")
    monkeypatch.delenv("UNIDIST_TEST_NEW", raising=False)
    with util.env(UNIDIST_TEST_SET="within", UNIDIST_TEST_NEW="new", UNIDIST_TEST_NONE=None):
        assert os.environ["UNIDIST_TEST_SET"] == "within"
        assert os.environ["UNIDIST_TEST_NEW"] == "new"
        assert "UNIDIST_TEST_NONE" not in os.environ
    assert os.environ["UNIDIST_TEST_SET"] == "before"
    assert "UNIDIST_TEST_NEW" not in os.environ


def test_a_function_is_computed_once_for_its_arguments() -> None:
    calls = []

    @util.compute_once
    def double(number: int) -> int:
        calls.append(number)
        return 2 * number

    assert [double(1), double(2), double(1)] == [2, 4, 2]
    assert calls == [1, 2]


def test_versions_are_compared_by_number() -> None:
    assert util.is_version_greater_equal_than("2.10.0", "2.9.1")
    assert not util.is_version_greater_equal_than("2.9.0rc1", "2.9.0")
    for wrong in ("2.9", 2.9):
        with pytest.raises(ValueError, match="give texts such as"):
            util.is_version_greater_equal_than("2.10.0", wrong)  # type: ignore[arg-type]


def test_what_is_built_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert not util.ddl_built()
    assert not util.ccl_built(verbose=True)
    assert capsys.readouterr().out == "unidist cannot use ccl here\n"
    assert isinstance(util.gloo_built(), bool)
    assert isinstance(util.mpi_built(), bool)
