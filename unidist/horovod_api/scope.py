"""The ranks on which a script's named operations run, and names for operations without one."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import SupportsIndex

from unidist.errors import OperationError
from unidist.negotiation import NamedOperations
from unidist.negotiation.process_sets import ProcessSet
from unidist.runtime import context


class Scope:
    """The ranks that an operation runs over, as this process sees them. Made by `scope_of`.

    Attributes:
        submit: starts an operation, see `NamedOperations.submit`.
        run: does one and waits for it, see `NamedOperations.run`.
        size: number of ranks.
        rank: of this process among them.
    """

    def __init__(self, operations: NamedOperations, ranks: Sequence[int]) -> None:
        self._operations = operations
        self.submit, self.run = operations.submit, operations.run
        self._ranks = ranks
        self._counters: dict[str, itertools.count[int]] = defaultdict(lambda: itertools.count(1))
        self.size, self.rank = operations.size, operations.rank

    def name(self, kind: str, name: str | None) -> str:
        """Return the name of an operation: as given, or numbered in order of the calls.

        Raises:
            OperationError: the name is no text.
        """
        if name is not None and not isinstance(name, str):
            raise OperationError(f"name={name!r} of an operation: give a string, or leave it out")
        return name or f"{kind}.noname.{next(self._counters[kind])}"

    def moves(self, memory: str) -> bool:
        """Return whether operations may have buffers in this kind of memory, see `NamedOperations.moves`."""
        return self._operations.moves(memory)

    def root(self, world_rank: int) -> int:
        """Return the rank within the scope of a root, which scripts give as a world rank.

        Raises:
            OperationError: it is no rank, or not one of the scope's.
        """
        if not isinstance(world_rank, SupportsIndex):
            raise OperationError(f"root_rank={world_rank!r}: give the number of a rank")
        if world_rank not in self._ranks:
            ranks = list(self._ranks)
            is_range = ranks == list(range(ranks[0], ranks[-1] + 1))
            choices = f"{ranks[0]} to {ranks[-1]}" if is_range else ", ".join(map(str, ranks))
            raise OperationError(f"root_rank={world_rank} is not one of this operation's ranks; choices: {choices}")
        return self._ranks.index(world_rank)


def scope_of(process_set: ProcessSet) -> Scope:
    """Return where operations of a process set run.

    Raises:
        NotInitializedError: before `init()`.
        UsageError: the set is not registered, or this process is not in it.
    """
    scope: Scope | None = process_set.scope
    if scope is None:
        scope = process_set.scope = Scope(context.current().operations(process_set), process_set.ranks)
    return scope
