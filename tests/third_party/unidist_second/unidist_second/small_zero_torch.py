"""The strategy `small-zero` for PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from unidist.errors import UsageError
from unidist_second.small_zero import SmallZeroBinding
from unidist_torch.gradients import sharded_gradient
from unidist_torch.memory import buffer_of
from unidist_torch.optimizer import InnerStep, refuse_scaler

if TYPE_CHECKING:
    from unidist.optim import MakesInnerStep, Update


class TorchSmallZero(SmallZeroBinding):
    """See `SmallZeroBinding`."""

    def inner_step(self) -> MakesInnerStep:
        """Return the class of the inner step."""
        return OwnersStep


class OwnersStep(InnerStep):
    """Each rank steps on the parameters that it owns, and sends them to the others.

    Args:
        optimizer: the bound optimizer. Its state on a rank is that of the rank's own parameters.
        plain: its class before it was bound.
        update: the framework-free side.
    """

    sharded = True

    def __init__(self, optimizer: torch.optim.Optimizer, plain: type[torch.optim.Optimizer], update: Update) -> None:
        self._optimizer, self._plain, self._update = optimizer, plain, update
        self._parameters: Sequence[torch.Tensor] = ()
        self._gradients: Sequence[torch.Tensor | None] = ()
        self._present: list[bool] = []

    def parameters_changed(
        self, parameters: Sequence[torch.Tensor], first: int, views: Sequence[torch.Tensor | None]
    ) -> None:
        """Take note of where reduced gradients are."""
        self._parameters, self._gradients = parameters, views
        self._present += [False] * (len(parameters) - len(self._present))

    def take(self, first: int, present: Sequence[bool | None]) -> None:
        """Take note of which there are; scripts see a placeholder, because other ranks have no use for the values."""
        for index, is_present in enumerate(present, start=first):
            self._present[index] = bool(is_present)
            parameter = self._parameters[index]
            parameter.grad = sharded_gradient(parameter) if is_present else None

    def step(self, grad_scaler: Any) -> Any:
        """Update this rank's parameters, then take those of the others."""
        refuse_scaler(grad_scaler, "small-zero")
        rank = self._update.communicator.rank
        for index, parameter in enumerate(self._parameters):
            is_own = self._owner(index) == rank and self._present[index]
            parameter.grad = self._gradients[index] if is_own else None
        result = self._plain.step(self._optimizer)
        works = [
            self._update.communicator.broadcast(buffer_of(parameter.detach()), root=self._owner(index))
            for index, parameter in enumerate(self._parameters)
            if self._present[index]
        ]
        for work in works:
            work.wait()
        self.skip()
        return result

    def skip(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def take_part(self) -> None:
        """Update this rank's parameters for those that go on."""
        self.step(None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters. Collective: each rank gives what it has."""
        whole: dict[str, Any] = self._plain.state_dict(self._optimizer)
        own = whole["state"]
        for rank in self._update.communicator.members:
            theirs = self._update.context.broadcast_object(own, root=rank, name="small-zero.state")
            whole["state"] = {**whole["state"], **theirs}
        return whole

    def state_loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Drop what belongs to others."""
        rank = self._update.communicator.rank
        for index, parameter in enumerate(self._parameters):
            if self._owner(index) != rank:
                self._optimizer.state.pop(parameter, None)

    def kept_state(self, placements: Mapping[int, Any]) -> NoReturn:
        """Refuse: this sample writes no checkpoints."""
        raise UsageError("small-zero writes no checkpoints; save optimizer.state_dict(), or use zero=1")

    def _owner(self, index: int) -> int:
        return index % self._update.communicator.size
