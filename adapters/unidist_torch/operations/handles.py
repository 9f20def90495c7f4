"""Handles of asynchronous operations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Self

from typing_extensions import override

from unidist.errors import UsageError
from unidist.negotiation import NamedHandle
from unidist_torch.operations.places import StreamOrder

_numbers = itertools.count(1)


class Handle(int):
    """An operation under way, for `synchronize` and `poll`: a number, as Horovod's are, other than all before.

    Args:
        inner: the operation.
        output: returns its result.
        copy_back: puts the result where the caller wants it, if it was computed elsewhere.
        order: of the operation on a device; None: it is in host memory.
    """

    _inner: NamedHandle
    _output: Callable[[], Any]
    _copy_back: Callable[[], object] | None
    _order: StreamOrder | None

    def __new__(
        cls,
        inner: NamedHandle,
        output: Callable[[], Any],
        copy_back: Callable[[], object] | None = None,
        *,
        order: StreamOrder | None,
    ) -> Self:
        """Take the next number."""
        made = super().__new__(cls, next(_numbers))
        made._inner = inner
        made._output = output
        made._copy_back = copy_back
        made._order = order
        return made

    def done(self) -> bool:
        """Return whether the operation has ended; never blocks."""
        return self._inner.done()

    def wait(self) -> Any:
        """Wait for the operation and return its result; raises its error."""
        self._inner.wait()
        if self._order is not None:
            self._order.follow()
        if self._copy_back is not None:
            copy_back, self._copy_back = self._copy_back, None
            copy_back()
        return self._output()


class _Together:
    """Several operations that were started together, with one result."""

    _handles: Sequence[Handle]

    def done(self) -> bool:
        """Return whether all have ended; never blocks."""
        return all(handle.done() for handle in self._handles)

    def wait(self) -> Any:
        """Return the result when all have ended, as a list; raises the first error."""
        return [handle.wait() for handle in self._handles]


class GroupHandle(_Together, int):
    """Several operations under way, with the tuple of their results; a number too.

    Args:
        handles: of each.
    """

    def __new__(cls, handles: Sequence[Handle]) -> Self:
        """Take the next number."""
        made = super().__new__(cls, next(_numbers))
        made._handles = handles
        return made

    @override
    def wait(self) -> Any:
        return tuple(super().wait())


class SparseHandle(_Together):
    """A sparse all-reduce under way. As Horovod's it is no number: calling it waits and returns the result.

    Args:
        handles: of its parts.
        combine: makes the result of the list of theirs.
    """

    def __init__(self, handles: Sequence[Handle], combine: Callable[[list[Any]], Any]) -> None:
        self._handles = handles
        self._combine = combine

    @override
    def wait(self) -> Any:
        return self._combine(super().wait())

    __call__ = wait


AnyHandle = Handle | GroupHandle | SparseHandle


def synchronize(handle: AnyHandle) -> Any:
    """Wait for an asynchronous operation and return its result, a tensor or several; raises its error.

    Of what is no handle it returns None, as Horovod does.
    """
    return handle.wait() if isinstance(handle, AnyHandle) else None


def poll(handle: AnyHandle) -> bool:
    """Return whether an asynchronous operation has ended; never blocks.

    Raises:
        UsageError: it is no handle.
    """
    if not isinstance(handle, AnyHandle):
        raise UsageError(f"poll({handle!r}): give a handle that an asynchronous operation has returned")
    return handle.done()
