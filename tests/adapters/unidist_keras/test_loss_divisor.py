"""The number by which Keras divides losses, and where ranks with different ones cannot have a right weight."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow", reason="Keras runs on it here")

import keras

from unidist_keras.losses.divisor import LossDivisor


def _loss(reduction: str = "sum_over_batch_size", **options: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction, **options)


def _divisor(loss: Any, weights: Any = None) -> LossDivisor:
    """Note the divisor of two samples, of which the second one has the class 2."""
    divisor = LossDivisor(loss, weights)
    targets, outputs = keras.ops.convert_to_tensor([0, 2]), keras.ops.zeros((2, 3))
    compiled: Any = keras.losses.Loss()
    compiled.call = lambda y_true, y_pred, weights: [
        each(y_true, y_pred, weights) for each in keras.tree.flatten(loss) if each is not None
    ]
    with divisor.noted_in(compiled):
        compiled.call(targets, outputs, weights)
    return divisor


def test_a_mean_over_samples_has_none() -> None:
    assert (_divisor(_loss()).value, _divisor(_loss()).problem) == (None, "")


def test_what_counts_is_the_divisor() -> None:
    weights = keras.ops.convert_to_tensor([0.5, 2.0])
    assert float(_divisor(_loss(ignore_class=2)).value) == 1
    assert float(_divisor(_loss("mean_with_sample_weight"), weights).value) == 2.5
    assert float(_divisor(_loss("mean_with_sample_weight", ignore_class=2), weights).value) == 0.5
    assert _divisor(_loss(), weights).value is None  # divided by the number of samples
    assert _divisor(_loss("mean_with_sample_weight")).value is None


def test_a_sum_is_a_problem() -> None:
    divisor = _divisor(_loss("sum"))
    assert divisor.value == 1
    assert "distribute(op=ud.Sum)" in divisor.problem


@pytest.mark.parametrize("others", [{"reduction": "sum"}, {"ignore_class": 2}])
def test_losses_with_different_divisors_are_a_problem(others: dict[str, Any]) -> None:
    divisor = _divisor([_loss(), _loss(**others)])
    assert divisor.value is None
    assert "different numbers" in divisor.problem


def test_losses_are_left_as_they_were() -> None:
    loss = _loss(ignore_class=2)
    before = dict(vars(loss))
    _divisor(loss)
    assert vars(loss) == before
