"""The inner step of a bound optimizer: from the reduced gradients to the new parameters.

The usual one, `WholeStep`, gives every parameter its whole gradient and calls the step of the optimizer's own class.
A strategy with the capability `BringsInnerStep` brings another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from unidist.errors import UsageError
from unidist.optim.update import Update
from unidist_torch.models import plain_use
from unidist_torch.optimizer.grad_scaler import scaled_step
from unidist_torch.optimizer.narrow_step import ElementRange, NarrowStep, SteppedTensor

if TYPE_CHECKING:
    from unidist.checkpoint.format.interface import KeepsState
    from unidist.checkpoint.format.pieces import Placement


class InnerStep(ABC):
    """The inner step of one bound optimizer. Every rank of the data axis calls its methods in the same order.

    The binding calls `parameters_changed` whenever exchanges were made (first when the optimizer is bound), then for
    every update `take`, and `step` or, where a gradient has overflowed, `skip`.

    Attributes:
        sharded: each rank updates a shard of the parameters: there is no whole `p.grad`, and gradients are dense.
    """

    sharded: bool = False

    @property
    def keeps_parameters(self) -> bool:
        """Whether it steps on the model's own parameters, all of which this rank has between two updates.

        Then others may change them there (`Update.actors`). Not where it has copies (master weights), or parts.
        """
        return False

    @property
    def shards_state(self) -> bool:
        """Whether a rank has its shard of the optimizer's state alone; else each can give all of it. As `sharded`."""
        return self.sharded

    def before_agreement(self) -> None:  # noqa: B027 - nothing to do is a valid answer
        """Called before the ranks agree on parameters and make exchanges; the update's options may be changed here."""

    @abstractmethod
    def parameters_changed(
        self, parameters: Sequence[torch.Tensor], first: int, views: Sequence[torch.Tensor | None]
    ) -> None:
        """Take note of the parameters from number `first` on, which are new or have new views. Collective.

        Args:
            parameters: all that are exchanged, as numbered by the `Update`.
            first: those before are unchanged.
            views: for each parameter the memory that its gradient is written to, in its shape; None if that moves.
        """

    @abstractmethod
    def take(self, first: int, present: Sequence[bool | None]) -> None:
        """Take the reduced gradients of the parameters from number `first` on, just after `Update.finish`.

        Args:
            first: number of the first of them.
            present: for each, whether any rank had a gradient (if none had, it is not to be updated); None for one
                whose sparse gradients are exchanged elsewhere, and which is left alone here.
        """

    @abstractmethod
    def step(self, grad_scaler: Any) -> Any:
        """Update the parameters on every rank; returns what the step of the optimizer's class returns.

        Args:
            grad_scaler: torch's GradScaler, which the script uses, or None.
        """

    def take_part(self) -> None:  # noqa: B027 - nothing to do is a valid answer
        """Take part in the step of the others on a rank that has joined; called in place of `step`."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return the optimizer's `state_dict` if its own would not do, else None. Collective if sharded."""
        return None

    def state_loaded(self, state_dict: Mapping[str, Any]) -> None:  # noqa: B027 - nothing to do is a valid answer
        """Take note that `load_state_dict` has replaced the optimizer's state by another, for whole parameters.

        Args:
            state_dict: as it was given; torch has brought its tensors to the types of the parameters.
        """

    def kept_state(self, placements: Mapping[int, Placement]) -> KeepsState | None:
        """Return the optimizer's part in checkpoints; None leaves it to the adapter.

        Args:
            placements: of its parameters, by their identity.
        """
        return None

    def skip(self) -> None:  # noqa: B027 - nothing to do is a valid answer
        """Drop the gradients: one has overflowed on some rank, and no rank steps."""

    def close(self) -> None:  # noqa: B027 - nothing to do is a valid answer
        """Give back memory and communicators. Idempotent."""


def has_sharded_state(optimizer: Any) -> bool:
    """Return whether the state of an optimizer is sharded over the ranks."""
    return bool(getattr(getattr(optimizer, "_unidist", None), "shards_state", False))


class WholeStep(InnerStep):
    """Every rank steps with all gradients.

    Args:
        optimizer: the bound optimizer.
        plain: its class before it was bound.
        update: the framework-free side.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, plain: type[torch.optim.Optimizer], update: Update) -> None:
        self._optimizer = optimizer
        self._plain = plain
        self._update = update
        self._parameters: Sequence[torch.Tensor] = ()
        self._views: Sequence[torch.Tensor | None] = ()
        self._narrow = NarrowStep.wanted(update.options.precision, plain)

    @property
    @override
    def keeps_parameters(self) -> bool:
        return True

    @override
    def parameters_changed(
        self, parameters: Sequence[torch.Tensor], first: int, views: Sequence[torch.Tensor | None]
    ) -> None:
        self._parameters = parameters
        self._views = views

    @override
    def take(self, first: int, present: Sequence[bool | None]) -> None:
        """Make each gradient a view of the memory that it was reduced in."""
        with plain_use():
            for index, is_present in enumerate(present, start=first):
                if is_present is not None:
                    self._parameters[index].grad = self._views[index] if is_present else None

    @override
    def step(self, grad_scaler: Any) -> Any:
        """Step. The gradients are reduced, so every rank's scaler finds the same overflows."""
        return scaled_step(self._step, self._optimizer, grad_scaler)

    def _step(self, optimizer: torch.optim.Optimizer) -> Any:
        if self._narrow is None:
            return self._plain.step(optimizer)
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        tensors = [
            SteppedTensor(parameter, group, [ElementRange(numbers[id(parameter)], 0, 0, parameter.numel())])
            for group, options in enumerate(optimizer.param_groups)
            for parameter in options["params"]
            if id(parameter) in numbers
        ]
        for before in list(optimizer._optimizer_step_pre_hooks.values()):
            before(optimizer, (), {})
        result = self._narrow.step(optimizer, tensors, self._update.step)
        for after in list(optimizer._optimizer_step_post_hooks.values()):
            after(optimizer, (), {})
        return result

    @override
    def skip(self) -> None:
        """Drop the gradients: a script that never zeroes them must not add to infinities."""
        for parameter in self._parameters:
            parameter.grad = None


def refuse_scaler(grad_scaler: Any, strategy: str) -> None:
    """Raise UsageError if the script uses torch's GradScaler, which looks for whole gradients, with `strategy`."""
    if grad_scaler is not None:
        raise UsageError(
            f"torch's GradScaler looks at whole gradients, of which strategy {strategy!r} leaves a shard on each rank. "
            "Leave the scaler out and use --strategy precision=fp16 beside it, or bfloat16, which needs no scaling"
        )
