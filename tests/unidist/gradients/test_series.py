"""Several exchanges as one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fake_exchange import FakeExchange

from unidist.buffer import DType
from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.interface import NO_NOTICE, NOTICE_BYTES
from unidist.gradients.series import ExchangeSeries

NOTICE = bytes(range(3, 3 + NOTICE_BYTES))


def infos(names: str) -> list[ParameterInfo]:
    return [ParameterInfo(name, (2,), DType.FLOAT32) for name in names]


@pytest.fixture
def parts() -> list[FakeExchange]:
    return [FakeExchange(infos("ab")), FakeExchange(infos("c"))]


@pytest.fixture
def series(parts: list[FakeExchange]) -> ExchangeSeries:
    made = ExchangeSeries()
    for part in parts:
        made.add(part)
    return made


def test_parameters_are_numbered_on(series: ExchangeSeries, parts: list[FakeExchange]) -> None:
    assert [info.name for info in series.parameters] == ["a", "b", "c"]
    assert series.places == [(parts[0], 0), (parts[0], 1), (parts[1], 0)]


def test_all_or_the_later_exchanges_are_completed(series: ExchangeSeries, parts: list[FakeExchange]) -> None:
    assert series.finish(lambda exchange: None, notice=NOTICE, first_parameter=0) == ([True] * 3, NOTICE)
    assert series.finish(lambda exchange: 0.5, notice=NO_NOTICE, first_parameter=2) == ([True], NO_NOTICE)
    assert [part.calls for part in parts] == [[("finish", None, 3)], [("finish", None, 3), ("finish", 0.5, 0)]]


def test_a_pass_ends_where_passes_are_reduced(series: ExchangeSeries, parts: list[FakeExchange]) -> None:
    class ReducesPasses(FakeExchange):
        reduces_each_pass = True

        def end_pass(self) -> None:
            self.calls.append("end pass")

    assert not series.reduces_each_pass
    other = ReducesPasses(infos("d"))
    series.add(other)
    assert series.reduces_each_pass
    series.end_pass()  # the usual exchange would raise
    assert (other.calls, parts[0].calls) == (["end pass"], [])


def test_an_exchange_is_closed_when_the_one_that_replaces_it_is_made(
    series: ExchangeSeries, parts: list[FakeExchange]
) -> None:
    made: list[FakeExchange] = []

    def make(parameters: Sequence[ParameterInfo]) -> FakeExchange:
        assert parts[len(made)].calls == []
        made.append(FakeExchange(parameters))
        return made[-1]

    series.replace(make)
    assert list(series.exchanges) == made
    assert series.places == [(made[0], 0), (made[0], 1), (made[1], 0)]
    assert [part.calls for part in parts] == [["close"], ["close"]]


def test_what_is_left_to_multiply_by_goes_to_each_and_more_is_for_others(
    series: ExchangeSeries, parts: list[FakeExchange]
) -> None:
    series.defer([0.5, 0.25, 1.0])
    assert [part.pending_factor for part in parts] == [0.5, 0.25]
