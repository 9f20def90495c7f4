"""What every adapter's `TrainStep` does with a batch, in one order."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest

from unidist.errors import PluginError
from unidist.observation import stacks
from unidist.runtime import context
from unidist.training import PlannedStep, SampleWeight, Trees


class Rows(list[float]):
    """Numbers with a shape, as an array has it."""

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)


class Recorded(PlannedStep):
    """Says what it is asked for; a batch's loss is the sum of its numbers."""

    _trees = Trees(list, map)

    def __init__(self, plan: Any) -> None:
        super().__init__(plan, None)  # type: ignore[arg-type]
        self.events: list[Any] = []
        self._replica_check: Any = SimpleNamespace(
            is_due=lambda number: number == 1, compare=lambda moment: self.events.append(moment)
        )

    def _begin(self) -> Any:
        self.events.append("begin")
        return super()._begin()

    def _prepared(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        self.events.append("prepare")
        return tuple(Rows(each) for each in batch)

    def _check_first(self, batch: tuple[Any, ...]) -> None:
        self.events.append("check outputs")

    def _run_batch(self, batch: tuple[Any, ...], weight: SampleWeight | None) -> float:
        self.events += ["run" if weight is None else f"run with weight {weight.factor()}", *stacks[get_ident()][-1:]]
        return float(sum(batch[0]))

    def _evaluate_batch(self, batch: tuple[Any, ...]) -> float:
        self.events.append("evaluate")
        return float(sum(batch[0]))

    def _predict_batch(self, inputs: Any) -> Any:
        self.events.append("predict")
        return inputs

    def _scalar(self, value: float, like: Any) -> float:
        self.events.append("mean")
        return value

    def _update(self) -> None:
        self.events.append("update")


@pytest.fixture(autouse=True)
def _runtime() -> Iterator[None]:
    context.init()
    yield
    context.shutdown()


def plan(events: list[Any] | None = None, *, alone: bool = False) -> Any:
    owner = None if events is None else SimpleNamespace(pull=lambda: events.append("pull"))
    return SimpleNamespace(runs_steps=None, steps_alone=alone, owns_parameters=owner)


def test_a_step_does_its_parts_in_one_order() -> None:
    step = Recorded(plan())
    assert step._train([1, 2]) == 3
    run = ["prepare", "check outputs", "run with weight 1.0", "train_step()", "mean", "update"]
    assert step.events == ["begin", *run, "after step 1"]
    step.events.clear()
    step._train([4])
    assert step.events == run
    progress = context.current().progress
    assert (progress._values, progress._num_samples) == ({"loss": 4}, 3)


def test_ranks_that_step_alone_take_no_mean() -> None:
    step = Recorded(plan(alone=True))
    step._train([1, 2])
    assert "run" in step.events
    assert "mean" not in step.events
    step._mean_loss_of([1, 2])
    assert step.events[-2:] == ["evaluate", "mean"]


def test_evaluation_and_outputs_are_of_the_newest_parameters() -> None:
    events: list[Any] = []
    step = Recorded(plan(events))
    step.events = events
    assert step._mean_loss_of([1, 2]) == 3
    assert step._outputs_of([5]) == [5]
    assert events == ["prepare", "pull", "evaluate", "mean", "prepare", "pull", "predict"]


def test_a_framework_whose_steps_are_no_transactions_says_so_in_an_elastic_job(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OtherWay(Recorded):
        _elastic_alternative = "fit"

    with caplog.at_level(logging.WARNING):
        OtherWay(plan())._train([1])
        monkeypatch.setattr(context.current(), "membership", SimpleNamespace(generations=object()))
        OtherWay(plan())._train([1])  # in a function of ud.elastic.run
        assert not caplog.records
        monkeypatch.setattr(context.current(), "membership", SimpleNamespace(generations=None))
        step = OtherWay(plan())
        step._train([1])
        step._train([1])
    (record,) = caplog.records
    assert "this TrainStep cannot go on when ranks change: use fit" in record.getMessage()


def test_an_adapter_without_elastic_training_is_named() -> None:
    step = Recorded(plan())
    with pytest.raises(PluginError, match=r"test_train_step\.Recorded has no elastic training: .* _make_state"):
        step._accumulate(2)
    with pytest.raises(PluginError, match=r"Recorded has no elastic training"):
        step._make_state(None, {})  # type: ignore[arg-type]  # it is not looked at
