"""A loss that is no mean over the samples of a batch is refused, with what to do."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow")

import keras

from unidist.errors import UsageError
from unidist_pipeline._keras.losses import check_loss


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
