"""Local SGD for PyTorch: the optimizer's own step, and a synchronization after the updates that need one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from unidist.buffer import Buffer
from unidist.optim import MakesInnerStep, Update
from unidist_local_sgd.binding import LocalSGDBinding, TrainedState
from unidist_local_sgd.strategy import LocalSGD
from unidist_local_sgd.synchronization import Synchronizer
from unidist_torch.framework import TorchFramework
from unidist_torch.memory import buffer_of, is_dense
from unidist_torch.optimizer import InnerStep, WholeStep


class TorchLocalSGD(LocalSGDBinding):
    """See `LocalSGDBinding`."""

    @override
    def inner_step(self, strategy: LocalSGD) -> MakesInnerStep:
        def make(optimizer: torch.optim.Optimizer, plain: type[torch.optim.Optimizer], update: Update) -> InnerStep:
            update.options = replace(update.options, sparse_as_dense=True)  # sparse gradients would be exchanged
            return LocalStep(optimizer, plain, update, strategy)

        return make


class LocalStep(WholeStep):
    """Steps with this rank's own gradients.

    Args:
        optimizer: the bound optimizer.
        plain: its class before it was bound.
        update: the framework-free side.
        strategy: its options.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        plain: type[torch.optim.Optimizer],
        update: Update,
        strategy: LocalSGD,
    ) -> None:
        super().__init__(optimizer, plain, update)
        self._trained = TorchState(optimizer)
        self._synchronizer = StepSynchronizer(strategy, update, TorchFramework(), self._trained, optimizer)

    @override
    def parameters_changed(
        self, parameters: Sequence[torch.Tensor], first: int, views: Sequence[torch.Tensor | None]
    ) -> None:
        super().parameters_changed(parameters, first, views)
        if not self._synchronizer.needs_begin:
            self._synchronizer.end_window()  # of the parameters before
        self._trained.parameters = list(parameters)
        self._synchronizer.begin(self._update.parameters)

    @override
    def take(self, first: int, present: Sequence[bool | None]) -> None:
        if self._synchronizer.needs_start:
            self._synchronizer.keep_start(self._trained.values())
        super().take(first, present)


class StepSynchronizer(Synchronizer):
    """Synchronizes when an update was applied, whatever made the step: also a closure that is called several times."""

    @override
    def on_step(self, step: int) -> None:
        due = self.advance(step)
        if due:
            self.run(due, self._trained.values())


class TorchState(TrainedState):
    """Parameters and state of an optimizer, in their own memory.

    Args:
        optimizer: the bound optimizer.

    Attributes:
        parameters: those that are exchanged, as numbered by the `Update`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.parameters: list[torch.Tensor] = []
        self._optimizer = optimizer

    @override
    def values(self) -> Sequence[Buffer]:
        return [buffer_of(parameter) for parameter in self.parameters]

    @override
    def store(self, values: Sequence[Buffer]) -> None:
        """Do nothing: `values` are the parameters' memory."""

    @override
    def slots(self) -> Mapping[str, Buffer]:
        found: dict[str, Buffer] = {}
        for number, parameter in enumerate(self.parameters):
            state: Mapping[str, Any] = self._optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() and is_dense(value):
                    found[f"{number}.{name}"] = buffer_of(value)
        return found

    @override
    def store_slots(self, slots: Mapping[str, Buffer]) -> None:
        """Do nothing: `slots` are the state's memory."""
