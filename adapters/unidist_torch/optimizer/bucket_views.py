"""The views of gradients on the buckets of a bound optimizer: fixed ones, and ones that move with every pass."""

from __future__ import annotations

import torch
from typing_extensions import override

from unidist.optim.update import Update
from unidist_torch.gradients.parameters import shaped
from unidist_torch.memory import CopyInto, copy_plain, is_plain_copy, tensor_of


class BucketView(CopyInto):
    """The memory of one gradient in its bucket, which stays where it is.

    Args:
        update: has the buckets.
        index: number of the parameter.
        parameter: whose shape and memory order the gradient has.

    Attributes:
        tensor: the memory in that shape; None if it moves.
    """

    tensor: torch.Tensor | None

    def __init__(self, update: Update, index: int, parameter: torch.Tensor) -> None:
        self.tensor = tensor = shaped(tensor_of(update.buffer(index)), parameter)
        super().__init__(tensor)

    def add(self, gradient: torch.Tensor) -> None:
        """Add a gradient to the one in the bucket."""
        assert self.tensor is not None
        with torch.no_grad():
            self.tensor.add_(gradient)


class MovingBucketView(BucketView):
    """The memory of a gradient that is elsewhere in every pass (`GradientExchange.buffers_move`)."""

    tensor = None

    def __init__(self, update: Update, index: int, parameter: torch.Tensor) -> None:
        self._update = update
        self._index = index
        # The parameter may have no memory, and so no memory order, now or when its gradient is written.
        self._form = shaped(torch.empty(parameter.numel(), dtype=parameter.dtype, device="meta"), parameter)
        self._is_plain = parameter.is_cpu

    @override
    def holds(self, tensor: torch.Tensor) -> bool:
        """Return False: autograd does not know the memory."""
        return False

    @override
    def copy(self, source: torch.Tensor) -> None:
        """Write a gradient into the bucket."""
        buffer = self._update.buffer(self._index)
        form = self._form
        if self._is_plain and is_plain_copy(source, form.stride(), form.dtype):
            copy_plain(buffer.address, source.data_ptr(), buffer.nbytes)
            return
        with torch.no_grad():
            shaped(tensor_of(buffer), form).copy_(source)

    def add(self, gradient: torch.Tensor) -> None:
        """Add a gradient to the one in the bucket, which stays where it is until it is exchanged."""
        with torch.no_grad():
            shaped(tensor_of(self._update.buffer(self._index)), self._form).add_(gradient)


def make_bucket_view(update: Update, index: int, parameter: torch.Tensor) -> BucketView:
    """Return the view for a parameter's gradient."""
    return (MovingBucketView if update.buffer_moves(index) else BucketView)(update, index, parameter)
