"""Strategies named after those of `tf.distribute`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from unidist.builtin.data import DataParallel
from unidist.errors import ConfigurationError
from unidist.mesh import DATA_AXIS
from unidist.strategy.interface import GradientOwner, Plan, Strategy

if TYPE_CHECKING:
    from unidist.framework import Framework
    from unidist.gradients.buckets import ParameterInfo
    from unidist.gradients.interface import GradientExchange
    from unidist.gradients.options import ExchangeOptions
    from unidist.runtime_api import RuntimeAPI


@dataclass(frozen=True)
class OneDevice(Strategy):
    """Trains on one process, as `tf.distribute.OneDeviceStrategy` does on one device.

    For scripts in which the name of the strategy is a variable.
    """

    name: ClassVar[str] = "one_device"

    def validate(self, plan: Plan) -> None:
        """There is one process."""
        if plan.world_size > 1:
            raise ConfigurationError(
                f"one_device trains on one process: leave out -np {plan.world_size}, or use mirrored"
            )


@dataclass(frozen=True)
class MultiWorkerMirrored(Strategy, GradientOwner):
    """Averages gradients over all ranks, on any number of hosts: `data`, which has options.

    As `tf.distribute.MultiWorkerMirroredStrategy`, with a process for each device.
    """

    name: ClassVar[str] = "multi_worker_mirrored"
    axis: ClassVar[str | None] = DATA_AXIS
    axis_order: ClassVar[int] = DataParallel.axis_order

    @override
    def make_exchange(
        self, parameters: Sequence[ParameterInfo], context: RuntimeAPI, framework: Framework, options: ExchangeOptions
    ) -> GradientExchange:
        return DataParallel().make_exchange(parameters, context, framework, options)


@dataclass(frozen=True)
class Mirrored(MultiWorkerMirrored):
    """Averages gradients over the ranks of one host: `data`, which has options.

    As `tf.distribute.MirroredStrategy`, with a process for each device.
    """

    name: ClassVar[str] = "mirrored"

    @override
    def make_exchange(
        self, parameters: Sequence[ParameterInfo], context: RuntimeAPI, framework: Framework, options: ExchangeOptions
    ) -> GradientExchange:
        """Return the exchange of `data`. Collective.

        Raises:
            ConfigurationError: on every rank, if they are not on one host.
        """
        hosts = context.topology.num_nodes
        if hosts > 1:
            raise ConfigurationError(
                f"mirrored trains on one host, and this job has {hosts}: use multi_worker_mirrored"
            )
        return super().make_exchange(parameters, context, framework, options)


@dataclass(frozen=True)
class TPU(Strategy):
    """Always an error: no strategy of unidist trains on TPUs under TensorFlow."""

    name: ClassVar[str] = "tpu"

    def validate(self, plan: Plan) -> None:
        """Say what there is."""
        raise ConfigurationError(
            "tpu: TensorFlow's TPUStrategy has no counterpart here. Train with JAX (unidist.jax, or Keras with "
            "KERAS_BACKEND=jax), whose engine xla uses XLA's own collectives; it has never run on a TPU"
        )
