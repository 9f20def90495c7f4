"""What the framework says of models."""

from __future__ import annotations

import keras
import pytest

from unidist.cost_model.figures import ParameterFigures
from unidist.errors import UsageError
from unidist_tensorflow.framework import TensorFlowFramework


def test_every_parameter_is_sized_by_its_path() -> None:
    first, norm = keras.layers.Dense(4, name="first"), keras.layers.BatchNormalization(name="norm")
    last = keras.layers.Dense(2, name="last", dtype="float64")
    model = keras.Sequential([keras.Input((3,)), first, norm, last], name="net")
    first.trainable = False
    assert TensorFlowFramework().parameter_figures(model) == {
        "net/first/kernel": ParameterFigures(12, 4, trained=False),
        "net/first/bias": ParameterFigures(4, 4, trained=False),
        "net/norm/gamma": ParameterFigures(4, 4),
        "net/norm/beta": ParameterFigures(4, 4),
        "net/norm/moving_mean": ParameterFigures(4, 4, trained=False),
        "net/norm/moving_variance": ParameterFigures(4, 4, trained=False),
        "net/last/kernel": ParameterFigures(8, 8),
        "net/last/bias": ParameterFigures(2, 8),
    }


def test_a_model_that_is_not_built_has_no_size_yet() -> None:
    with pytest.raises(UsageError, match="not built yet"):
        TensorFlowFramework().parameter_figures(keras.Sequential([keras.layers.Dense(4)]))
