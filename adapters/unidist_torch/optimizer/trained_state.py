"""The parameters and the state of a bound torch optimizer, in their own memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from unidist.buffer import Buffer
from unidist.optim.actors import TrainedState, check_keeps_parameters
from unidist_torch.memory import buffer_of, is_dense
from unidist_torch.optimizer.inner_step import InnerStep
from unidist_torch.parameter_states import ParameterStates


class TorchTrainedState(TrainedState):
    """See `TrainedState`.

    Args:
        optimizer: the bound optimizer.
        parameters: those that are exchanged, as numbered by the `Update`; the list that grows with it.
        inner: its inner step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], inner: InnerStep) -> None:
        self._states = ParameterStates(optimizer)
        self._parameters = parameters
        self._inner = inner

    @override
    def values(self) -> Sequence[Buffer]:
        check_keeps_parameters(self._inner)
        return [buffer_of(parameter) for parameter in self._parameters]

    @override
    def store(self, values: Sequence[Buffer]) -> None:
        """Do nothing: `values` are the parameters' memory."""

    @override
    def slots(self) -> Mapping[str, Buffer]:
        found: dict[str, Buffer] = {}
        for number, parameter in enumerate(self._parameters):
            for name, value in self._states.slots(parameter).items():
                if value.is_floating_point() and is_dense(value):
                    found[f"{number}.{name}"] = buffer_of(value)
        return found

    @override
    def store_slots(self, slots: Mapping[str, Buffer]) -> None:
        """Do nothing: `slots` are the state's memory."""
