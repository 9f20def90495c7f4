"""Handles of asynchronous operations, where operations run, and host copies of what is not plain memory."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unidist import context
from unidist.errors import UsageError
from unidist.negotiation import NamedHandle, NamedOperations, Request
from unidist.process_sets import ProcessSet


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
        """Return the result when it is there; raises what went wrong."""
        self._inner.wait()
        if self._copy_back is not None:
            copy_back, self._copy_back = self._copy_back, None
            copy_back()
        return self._output()

    __call__ = wait


class GroupHandle:
    """Several operations that were started together; the result is made of theirs.

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
    """Return the result of an asynchronous operation when it is there: a tensor, or several; raises what went wrong."""
    return handle.wait()


def poll(handle: AnyHandle) -> bool:
    """Say whether an asynchronous operation has ended; never blocks."""
    return handle.done()


class Scope:
    """The ranks that an operation runs over, as this process sees them. Made by `scope_of`.

    Attributes:
        size: number of ranks.
        rank: of this process among them.
    """

    def __init__(self, operations: NamedOperations, ranks: Sequence[int]) -> None:
        self._operations = operations
        self._ranks = ranks
        self._counters: dict[str, itertools.count[int]] = defaultdict(lambda: itertools.count(1))
        self.size, self.rank = operations.size, operations.rank

    def name(self, kind: str, name: str | None) -> str:
        """Return the name of an operation: as given, or numbered in order of the calls."""
        return name or f"{kind}.noname.{next(self._counters[kind])}"

    def submit(self, request: Request, *, background: bool) -> NamedHandle:
        """Start an operation."""
        return self._operations.submit(request, background=background)

    def root(self, world_rank: int) -> int:
        """Return the rank within the scope of a root, which scripts give as a world rank."""
        if world_rank not in self._ranks:
            raise UsageError(f"root_rank={world_rank} is not one of the ranks {list(self._ranks)} of this operation")
        return self._ranks.index(world_rank)


_owner: context.Context | None = None
_scopes: dict[int, Scope] = {}


def scope_of(process_set: ProcessSet) -> Scope:
    """Return where operations of a process set run.

    Raises:
        NotInitializedError: before `init()`.
        UsageError: the set is not registered, or this process is not in it.
    """
    global _owner
    runtime = context.current()
    if runtime is not _owner:
        _owner = runtime
        _scopes.clear()
    number = process_set.process_set_id
    scope = _scopes.get(number) if number is not None else None
    if scope is None:
        scope = Scope(runtime.operations(process_set), process_set.ranks)
        assert number is not None, "operations() demands that the set is registered"
        _scopes[number] = scope
    return scope


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in contiguous host memory: the tensor itself where it is that already."""
    return tensor.detach().to("cpu").contiguous()


def staged(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object] | None]:
    """Return a contiguous host tensor with the same content, and what brings its content back, where it is a copy."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor, None
    copied = host_copy(tensor)
    return copied, lambda: tensor.copy_(copied)
