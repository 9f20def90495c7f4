"""The estimators of `horovod.spark`: those of `unidist.spark`, and the learning rate grows with the number of ranks."""

from __future__ import annotations

from typing import ClassVar

from unidist_spark.estimators import _keras, _torch


class TorchEstimator(_torch.TorchEstimator):
    """Multiplies the learning rate by the number of ranks, as Horovod's class does."""

    scales_learning_rate: ClassVar[bool] = True


class KerasEstimator(_keras.KerasEstimator):
    """Multiplies the learning rate by the number of ranks, as Horovod's class does.

    Horovod's callbacks that change it begin with that.
    """

    scales_learning_rate: ClassVar[bool] = True
