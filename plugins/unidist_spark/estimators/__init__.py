"""Estimators of Spark's ML pipelines: they train a model on the rows of a DataFrame.

`base` has what they share: arguments, the data of each rank, checkpoints, and the column of predictions. `_torch` and
`_keras` know a framework each, and neither knows the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_spark.estimators._keras import KerasEstimator, KerasModel
    from unidist_spark.estimators._torch import TorchEstimator, TorchModel

__all__ = ["KerasEstimator", "KerasModel", "TorchEstimator", "TorchModel"]

__getattr__ = lazy_names(__name__, {"_keras": "KerasEstimator KerasModel", "_torch": "TorchEstimator TorchModel"})
