"""A run that is shorter than the window of its optimizer says so."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from unidist.optim.accumulation import Accumulation, Window
from unidist.training.end_of_run import EndOfRun, never_complete


def warnings_after(steps: int, *, passes: int = 8, rank: int = 0, stepwise: bool = True, caplog: Any) -> list[str]:
    end = EndOfRun(SimpleNamespace(topology=SimpleNamespace(rank=rank)))  # type: ignore[arg-type]
    window = Window(Accumulation(passes, stepwise=stepwise))
    end.watch(lambda: never_complete(window))
    for _ in range(steps):
        if window.count_step():
            window.reset()
    with caplog.at_level(logging.WARNING):
        end.close()
    return [record.getMessage() for record in caplog.records]


def test_a_window_longer_than_the_run_names_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    (found,) = warnings_after(5, caplog=caplog)
    assert "accumulate=8: the run ends after 5 backward passes" in found
    assert "accumulate=5 or less" in found


@pytest.mark.parametrize(
    "case",
    [
        {"steps": 0},
        {"steps": 8},
        {"steps": 13},
        {"steps": 5, "rank": 1},
        {"steps": 5, "stepwise": False},
    ],
)
def test_other_runs_say_nothing(case: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_after(**case, caplog=caplog) == []
