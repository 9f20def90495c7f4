"""A loss that is no mean over the samples of a batch is refused, with what to do."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow")

import keras

from unidist.errors import UsageError
from unidist_pipeline._keras.losses import check_loss, targets_of_outputs


@pytest.mark.parametrize(
    ("options", "arguments", "says"),
    [
        ({"reduction": "sum"}, {}, "reduction='sum'"),
        ({"reduction": "mean_with_sample_weight"}, {"weighted": True}, "mean_with_sample_weight"),
        ({"ignore_class": 3}, {}, "ignore_class=3"),
        ({}, {"masked": True}, "Keras mask"),
    ],
)
def test_a_loss_that_is_no_mean_is_refused(options: dict[str, Any], arguments: dict[str, bool], says: str) -> None:
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)
    with pytest.raises(UsageError, match=says):
        check_loss(entropy, **{"masked": False, **arguments})


def test_a_mean_is_not() -> None:
    check_loss(keras.losses.SparseCategoricalCrossentropy(from_logits=True), masked=False)
    check_loss(keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"), masked=False)
    check_loss(lambda targets, outputs: outputs, masked=True)


@pytest.mark.parametrize(
    ("outputs", "losses", "expected"),
    [
        ([0, 0], ["mse", None], ["y", None]),
        ((0, 0), [None, "mse"], (None, "y")),
        ([0, 0], {"v": "mse", "u": None}, [None, "y"]),
        ({"v": 0, "u": 0}, {"v": "mse"}, {"v": "y", "u": None}),
        ([0], "mse", ["y"]),
        (0, "mse", "y"),
    ],
)
def test_one_tensor_is_the_target_of_the_output_that_has_a_loss(outputs: Any, losses: Any, expected: Any) -> None:
    assert targets_of_outputs("y", outputs, losses, ["u", "v"]) == expected


@pytest.mark.parametrize("losses", ["mse", ["mse", "mse"], [None, None], ["mse", None, None]])
def test_one_tensor_for_several_outputs_with_a_loss_is_refused(losses: Any) -> None:
    with pytest.raises(UsageError, match=r"2 outputs, . of them with a loss"):
        targets_of_outputs("y", [0, 0], losses, ["u", "v"])


def test_other_targets_stay() -> None:
    assert targets_of_outputs(["y"], [0, 0], ["mse", None], ["u", "v"]) == ["y"]
    assert targets_of_outputs(None, [0, 0], ["mse", None], ["u", "v"]) is None
