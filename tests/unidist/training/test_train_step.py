"""What every adapter's `TrainStep` does with a batch, in one order."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest

from unidist.elastic.batches import BatchShare, Position
from unidist.errors import ConfigurationError, PluginError, UsageError
from unidist.observation import stacks
from unidist.runtime import context
from unidist.training import PlannedStep, SampleWeight, Trees
from unidist.verification import Replay


class Rows(list[float]):
    """Numbers with a shape, as an array has it."""

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)


class Recorded(PlannedStep):
    """Says what it is asked for; a batch's loss is the sum of its numbers."""

    _trees = Trees(list, map)

    def __init__(self, plan: Any, **options: Any) -> None:
        super().__init__(plan, None, **options)  # type: ignore[arg-type]
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
    assert (progress._values, progress.samples) == ({"loss": 4}, 3)


def test_ranks_that_step_alone_take_no_mean() -> None:
    step = Recorded(plan(alone=True))
    step._train([1, 2])
    assert "run" in step.events
    assert "mean" not in step.events
    step._mean_loss_of([1, 2])
    assert step.events[-2:] == ["evaluate", "mean"]


def test_a_batch_is_computed_twice_before_it_is_trained_on() -> None:
    context.current().owned(Replay).every = 2

    class Digested(Recorded):
        def _digests_of(self, batch: tuple[Any, ...]) -> dict[str, bytes]:
            self.events.append("digest")
            return {"the loss": b""}

    step = Digested(plan())
    for _ in range(3):
        step._train([1, 2])
    kept = [event for event in step.events if event in ("digest", "update")]
    assert kept == ["digest", "digest", "update", "digest", "digest", "update", "update"]


def test_ranks_that_step_alone_are_not_compared() -> None:
    context.current().owned(Replay).every = 2
    with pytest.raises(ConfigurationError, match="--verify replay=2: the ranks compare in one step"):
        Recorded(plan(alone=True))


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


def _counts(targets: Any) -> float:
    return sum(each >= 0 for each in targets)


def test_a_micro_batch_of_an_elastic_step_weighs_as_much_as_counts_in_it() -> None:
    step = Recorded(plan(), weight=_counts)
    step._training = SimpleNamespace(progress=SimpleNamespace(batch_size=2))  # type: ignore[assignment]
    step._trees = Trees(lambda value: [value], lambda function, values: [Rows(function(each)) for each in values])
    step._accumulate = lambda passes: step.events.append(passes)  # type: ignore[method-assign]
    batch = (Rows([1, 2, 3]), Rows([5, -1, 7]))
    share = BatchShare(Position(), Position(), rank=0, size=1, total=3, indices=(0, 1, 2))
    assert step._train_share(batch, share) == 6  # the losses as they are: `Recorded` does not multiply
    run = [f"run with weight {0.5}", "update"]
    assert step.events == [2, *run, *run]


def test_a_batch_weighs_as_much_as_counts_in_it() -> None:
    update = SimpleNamespace(weigh=lambda total: 4.0)
    step = Recorded(plan(), weight=_counts)
    step.optimizer = SimpleNamespace(_unidist=SimpleNamespace(distributed_update=update))  # type: ignore[attr-defined]
    assert step._train([3, 4], [5, -1]) == 28  # the loss is 7, its factor 1 / 4; but `Recorded` does not multiply
    assert f"run with weight {1 / 4}" in step.events
    assert step._mean_loss_of([3, 4], [-1, -1]) == 0


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_a_weight_is_a_number_of_samples(weight: float) -> None:
    step = Recorded(plan(alone=True), weight=lambda _: weight)
    with pytest.raises(UsageError, match=f"weight of a loss is the number .* that of this rank is {weight}"):
        step._mean_loss_of([3, 4], [5, 6])
    step = Recorded(plan(), weight=lambda _: SimpleNamespace(shape=(2,)))
    with pytest.raises(UsageError, match=r"returned an array of shape \[2\]"):
        step._train([3, 4], [5, 6])
