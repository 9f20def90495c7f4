"""The places of gradients in the buckets of a bound optimizer: fixed ones, and ones that move with every pass."""

from __future__ import annotations

import torch

from unidist.optim.update import Update
from unidist_torch.gradients.parameters import shaped
from unidist_torch.memory import CopyInto, copy_plain, is_plain_copy, tensor_of


class Place:
    """A place that stays where it is.

    Args:
        update: has the buckets.
        index: number of the parameter.
        parameter: whose form the gradient has.

    Attributes:
        view: the memory in the parameter's form; None where it moves.
    """

    view: torch.Tensor | None

    def __init__(self, update: Update, index: int, parameter: torch.Tensor) -> None:
        self.view = view = shaped(tensor_of(update.buffer(index)), parameter)
        self._into = CopyInto(view)

    def holds(self, gradient: torch.Tensor) -> bool:
        """Say whether a gradient is this memory already."""
        return self._into.holds(gradient)

    def copy(self, gradient: torch.Tensor) -> None:
        """Write a gradient."""
        self._into.copy(gradient)

    def add(self, gradient: torch.Tensor) -> None:
        """Add a gradient to what is there."""
        assert self.view is not None
        with torch.no_grad():
            self.view.add_(gradient)


class MovingPlace(Place):
    """A place that is somewhere else in every pass (`GradientExchange.moves`)."""

    view = None

    def __init__(self, update: Update, index: int, parameter: torch.Tensor) -> None:
        self._update = update
        self._index = index
        # The parameter may be without memory, and without its memory order, when its gradient is written, or now.
        self._form = shaped(torch.empty(parameter.numel(), dtype=parameter.dtype, device="meta"), parameter)
        self._is_plain = parameter.is_cpu

    def holds(self, gradient: torch.Tensor) -> bool:
        """Return False: a gradient of an earlier pass is never there."""
        return False

    def copy(self, gradient: torch.Tensor) -> None:
        """Write a gradient."""
        buffer = self._update.buffer(self._index)
        form = self._form
        if self._is_plain and is_plain_copy(gradient, form.stride(), form.dtype):
            copy_plain(buffer.address, gradient.data_ptr(), buffer.nbytes)
            return
        with torch.no_grad():
            shaped(tensor_of(buffer), form).copy_(gradient)

    def add(self, gradient: torch.Tensor) -> None:
        """Never called: what moves is reduced in every pass."""
        raise AssertionError("gradients of several passes do not meet in a place that moves")


def place_of(update: Update, index: int, parameter: torch.Tensor) -> Place:
    """Return the place of a parameter's gradient."""
    return (MovingPlace if update.moves(index) else Place)(update, index, parameter)
