"""The model of an elastic `TrainStep` that is divided over ranks, through the generations of the job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from unidist import elastic
from unidist.runtime import context as runtime_of_process
from unidist_torch.memory import memory_kind
from unidist_torch.models.model_buffers import BufferRule
from unidist_torch.training.distributed_optimizer import TorchDistribution

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist.strategy.interface import Plan
    from unidist.strategy.plan import StrategyLike


class DividedTraining(elastic.DividedTraining):
    """See `unidist.elastic.DividedTraining`.

    Args:
        model: whole.
        optimizer: over its parameters, not bound.
        strategy: see `TrainStep`.
        buffers: see `distribute`.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, strategy: StrategyLike, buffers: BufferRule
    ) -> None:
        super().__init__(model, strategy)
        self._buffers = buffers
        self._optimizer: Any = optimizer
        self.memory_kinds = sorted({"host"} | {memory_kind(each).partition(":")[0] for each in model.parameters()})
        self.begin()

    @override
    def bind(self, plan: Plan, divide: elastic.Divide | None) -> torch.nn.Module:
        made = TorchDistribution(self.model, self._optimizer, plan, in_backward=False, buffers=self._buffers)
        made.bind(keeps_division=True, divide=divide)
        membership = runtime_of_process.current().membership
        assert membership is not None
        membership.remove_rebindable(self._optimizer._unidist)  # this does it, in an order that holds for all ranks
        return made.returned

    @override
    def rebind_optimizer(self, context: RuntimeAPI) -> bool:
        is_bound = hasattr(self._optimizer, "_unidist")
        if is_bound:
            self._optimizer._unidist.rebind(context)
        return is_bound
