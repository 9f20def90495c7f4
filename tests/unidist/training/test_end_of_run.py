"""A run that is shorter than the window of its optimizer says so."""

from __future__ import annotations

import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from unidist.optim.accumulation import Accumulation, Window
from unidist.training.end_of_run import EndOfRun, never_applied, never_complete


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


@pytest.mark.parametrize(
    ("step", "finished", "in_round", "is_told"),
    [(0, True, False, True), (0, False, True, True), (0, False, False, False), (3, True, False, False)],
)
def test_an_optimizer_that_has_got_gradients_and_never_stepped_is_told(
    step: int, finished: bool, in_round: bool, is_told: bool
) -> None:
    class Bound(SimpleNamespace):
        pass

    update: Any = Bound(step=step, window=SimpleNamespace(finished=finished, in_round=in_round))
    assert ("has never made a step" in never_applied(weakref.ref(update))) == is_told
    reference = weakref.ref(update)
    del update
    assert never_applied(reference) == ""
