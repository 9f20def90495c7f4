"""Handles of asynchronous operations, and host copies of tensors that are not plain memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unidist.negotiation import NamedHandle


class Handle:
    """An operation under way, for `synchronize` and `poll`. Calling it waits too, as a sparse all-reduce's does."""

    __slots__ = ("_copy_back", "_inner", "_output")

    def __init__(
        self, inner: NamedHandle, output: Callable[[], Any], copy_back: Callable[[], object] | None = None
    ) -> None:
        self._inner = inner
        self._output = output
        self._copy_back = copy_back

    def done(self) -> bool:
        """Say whether the operation has ended; never blocks."""
        return self._inner.done()

    def wait(self) -> Any:
        """Wait for the operation and return its result; raises its error."""
        self._inner.wait()
        if self._copy_back is not None:
            copy_back, self._copy_back = self._copy_back, None
            copy_back()
        return self._output()

    __call__ = wait


class GroupHandle:
    """Several operations that were started together, with one result.

    Args:
        handles: of each.
        combine: makes the result of the list of theirs; default: that list.
    """

    def __init__(self, handles: Sequence[Handle], combine: Callable[[list[Any]], Any] = list) -> None:
        self._handles = handles
        self._combine = combine

    def done(self) -> bool:
        """Say whether all have ended; never blocks."""
        return all(handle.done() for handle in self._handles)

    def wait(self) -> Any:
        """Return the result when all have ended; raises the first error."""
        return self._combine([handle.wait() for handle in self._handles])

    __call__ = wait


AnyHandle = Handle | GroupHandle


def synchronize(handle: AnyHandle) -> Any:
    """Wait for an asynchronous operation and return its result, a tensor or several; raises its error."""
    return handle.wait()


def poll(handle: AnyHandle) -> bool:
    """Say whether an asynchronous operation has ended; never blocks."""
    return handle.done()


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in contiguous host memory: the tensor itself if it is there already."""
    return tensor.detach().to("cpu").contiguous()


def staged(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object] | None]:
    """Return a contiguous host tensor with the same content and, if it is a copy, a function that copies it back."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor, None
    copied = host_copy(tensor)
    return copied, lambda: tensor.copy_(copied)
