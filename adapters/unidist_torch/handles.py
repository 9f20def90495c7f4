"""Handles of asynchronous operations, names for those without one, and host copies of what is not plain memory."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable

import torch

from unidist import context
from unidist.negotiation import Handle as NegotiatedHandle


class Handle:
    """An operation under way, for `synchronize` and `poll`."""

    __slots__ = ("_copy_back", "_inner", "_output")

    def __init__(
        self, inner: NegotiatedHandle, output: Callable[[], torch.Tensor], copy_back: Callable[[], object] | None
    ) -> None:
        self._inner = inner
        self._output = output
        self._copy_back = copy_back

    def done(self) -> bool:
        """Say whether the operation has ended; never blocks."""
        return self._inner.done()

    def wait(self) -> torch.Tensor:
        """Return the result when it is there; raises what went wrong."""
        self._inner.wait()
        if self._copy_back is not None:
            copy_back, self._copy_back = self._copy_back, None
            copy_back()
        return self._output()


class _Names:
    """Numbers for operations without a name, per runtime and kind."""

    def __init__(self) -> None:
        self._owner: context.Context | None = None
        self._counters: dict[str, itertools.count[int]] = {}

    def next(self, kind: str, owner: context.Context) -> str:
        if owner is not self._owner:
            self._owner, self._counters = owner, defaultdict(lambda: itertools.count(1))
        return f"{kind}.noname.{next(self._counters[kind])}"


names = _Names()


def synchronize(handle: Handle) -> torch.Tensor:
    """Return the result of an asynchronous operation when it is there; raises what went wrong."""
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Say whether an asynchronous operation has ended; never blocks."""
    return handle.done()


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous()


def staged(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object] | None]:
    """Return a contiguous host tensor with the same content, and what brings its content back, where it is a copy."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor, None
    copied = host_copy(tensor)
    return copied, lambda: tensor.copy_(copied)
