"""The estimators of `horovod.spark`: those of `unidist.spark`, and the learning rate grows with the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist_spark.estimators import _keras, _torch
from unidist_spark.estimators.base import Columns

MIN_PL_VERSION = "1.3.8"
"""The oldest Lightning that Horovod's class for it works with, which scripts look at."""


class TorchEstimator(_torch.TorchEstimator):
    """Multiplies the learning rate by the number of ranks, as Horovod's class does."""

    scales_learning_rate: ClassVar[bool] = True


class LightningEstimator(TorchEstimator):
    """`TorchEstimator` of `horovod.spark.lightning`: for modules of PyTorch, with an optimizer and a loss."""

    not_followed: ClassVar[Mapping[str, tuple[Any, str]]] = {
        **TorchEstimator.not_followed,
        **{
            name: (nothing, "no Trainer of Lightning's runs; leave it out")
            for name, nothing in {
                "debug_data_loader": False,
                "loader_num_epochs": None,
                "log_every_n_steps": 50,
                "logger": None,
                "num_gpus": None,
                "profiler": None,
                "terminate_on_nan": False,
                "train_async_data_loader_queue_size": None,
                "trainer_args": None,
                "val_async_data_loader_queue_size": None,
            }.items()
        },
    }

    @override
    def _checked(self) -> tuple[dict[str, Any], Columns]:
        if hasattr(self.getOrDefault("model"), "training_step"):
            raise ConfigurationError(
                "horovod.spark.lightning: a LightningModule cannot be followed: give a module of PyTorch, with "
                'optimizer and loss, or train it by unidist.spark.run, with Trainer(strategy="unidist").'
            )
        return super()._checked()


class KerasEstimator(_keras.KerasEstimator):
    """Multiplies the learning rate by the number of ranks, as Horovod's class does.

    Horovod's callbacks that change it begin with that.
    """

    scales_learning_rate: ClassVar[bool] = True
