"""Process sets: named operations and communicators over some of the ranks, by Horovod's rules.

A `ProcessSet` is a handle that scripts hold; what belongs to it lives in the context (`ProcessSets`) and ends with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unidist.communicator import Communicator, format_ranks
from unidist.errors import MismatchError, NotInitializedError, OperationError, UsageError
from unidist.negotiation import NamedOperations, objects

if TYPE_CHECKING:
    from unidist.topology import Topology


class ProcessSet:
    """Some of the ranks. Registered by `init(process_sets=...)` or `add_process_set`; until then it only has ranks.

    Args:
        ranks: world ranks; the set's own ranks count them in ascending order.

    Attributes:
        ranks: sorted.
        process_set_id: 0 for the global set, None while not registered.
        mpi_comm: None: Horovod's sets can be made of a communicator of MPI.
        scope: what `horovod_api.scope` keeps with the set while it is registered; None: nothing yet.
    """

    process_set_id: int | None = None
    mpi_comm: None = None
    ranks: list[int]
    scope: Any = None
    _registry: ProcessSets | None = None  # that has registered it

    def __init__(self, ranks: Iterable[int]) -> None:
        if not isinstance(ranks, Iterable):
            raise ValueError(f"ProcessSet({ranks!r}): give a list of ranks; communicators of MPI are not taken")
        self.ranks = sorted(ranks)
        if any(not isinstance(rank, int) for rank in self.ranks):
            raise ValueError(f"ProcessSet({self.ranks}): give a list of ranks, which are whole numbers")

    def size(self) -> int | None:
        """Return the number of ranks in the set, or None if it is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's rank within the set, or None if the set is not registered.

        Roots of operations are world ranks all the same.

        Raises:
            UsageError: this process is not in the set, see `included`.
        """
        if self.process_set_id is None:
            return None
        rank = self.registry.rank
        if rank not in self.ranks:
            raise UsageError(f"rank {rank} has no rank in {self!r}, to which it does not belong; ask included() before")
        return self.ranks.index(rank)

    def included(self) -> bool:
        """Return whether this process is in the set, which need not be registered.

        Raises:
            NotInitializedError: the runtime is not up.
        """
        registry = self._registry or global_process_set.registry
        return registry.rank in self.ranks

    def new_communicator(self) -> Communicator:
        """Return another communicator over the set, for host memory; see `ProcessSets.new_communicator`."""
        return self.registry.new_communicator(self)

    @property
    def registry(self) -> ProcessSets:
        """The process sets of the running context, which this one is among.

        Raises:
            NotInitializedError: the runtime is not up.
            UsageError: the set is not registered.
        """
        if self._registry is None:
            if self.process_set_id is not None:
                raise NotInitializedError("unidist is not initialized in this process; call init() first")
            raise UsageError(
                f"{self!r} is not registered; every rank passes it to init(process_sets=[...]) or calls add_process_set"
            )
        return self._registry

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    @override
    def __str__(self) -> str:
        """Return the set as Horovod writes it."""
        return f"{repr(self)[:-1]}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
"""All ranks. Its ranks are known after `init`."""
global_process_set.process_set_id = 0


@dataclass
class _Registered:
    handle: ProcessSet
    base: Communicator | None  # None on ranks outside
    operations: NamedOperations | None


class ProcessSets:
    """The process sets of one context. `add` and `remove` are collective over all ranks.

    Args:
        topology: this process's place.
        make_world: makes a communicator over all ranks, which somebody else closes. Collective.
        operations: the named operations over all ranks.
        make_operations: makes the named operations over a communicator, which they then own.

    Attributes:
        rank: of this process among all.
    """

    def __init__(
        self,
        topology: Topology,
        make_world: Callable[[], Communicator],
        operations: NamedOperations,
        make_operations: Callable[[Communicator], NamedOperations],
    ) -> None:
        self.rank, self._size = topology.rank, topology.world_size
        self._make_world = make_world
        self._world: Communicator | None = None  # most jobs have no other set than the global one
        self._operations = operations
        self._make_operations = make_operations
        self._next_id = 1
        self._made: weakref.WeakSet[Communicator] = weakref.WeakSet()
        global_process_set.ranks = list(range(topology.world_size))
        global_process_set._registry = self
        self._registered = {0: _Registered(global_process_set, None, operations)}

    def add(self, process_set: ProcessSet | Sequence[int]) -> ProcessSet:
        """Register a set and return it. Every rank calls it with the same ranks, those outside of the set too.

        Raises:
            ValueError: a set of these ranks is registered already, or there is no such rank.
            MismatchError: the ranks gave different sets.
        """
        handle = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
        self._check_agreed(handle.ranks)
        problem = self._problem(handle.ranks)
        if problem:
            raise ValueError(f"add_process_set({handle.ranks}) on rank {self.rank}: {problem}")
        base = self._own_world().split(handle.ranks if self.rank in handle.ranks else ())
        operations = None
        if base is not None:
            own = base.split(range(base.size))
            assert own is not None
            operations = self._make_operations(own)
        handle.process_set_id, self._next_id = self._next_id, self._next_id + 1
        handle._registry = self
        self._registered[handle.process_set_id] = _Registered(handle, base, operations)
        return handle

    def remove(self, process_set: ProcessSet) -> bool:
        """Take a set out of use. Every rank calls it, when no operation of the set is under way.

        Returns:
            Whether it was registered; the global set stays.
        """
        number = process_set.process_set_id
        if number is None or number == 0 or number not in self._registered:
            return False
        self._own_world().barrier().wait()
        self._close(self._registered.pop(number))
        return True

    def operations(self, process_set: ProcessSet) -> NamedOperations:
        """Return the named operations of a set, for a process that is in it."""
        registered = self._find(process_set)
        if registered.operations is None:
            raise OperationError(
                f"rank {self.rank} called an operation of {process_set!r}, to which it does not belong; "
                "let only the set's ranks call it"
            )
        return registered.operations

    def check_registered(self, process_set: ProcessSet) -> None:
        """Return if a set is registered.

        Raises:
            OperationError: it is not.
        """
        self._find(process_set)

    def find(self, number: int) -> ProcessSet | None:
        """Return the registered set of this `process_set_id`, or None. Also for a process that is not in it."""
        registered = self._registered.get(number)
        return None if registered is None else registered.handle

    def registered(self) -> list[ProcessSet]:
        """Return all registered sets, the global one first; also those that this process is not in."""
        return [each.handle for each in self._registered.values()]

    def new_communicator(self, process_set: ProcessSet) -> Communicator:
        """Return another communicator over a set, for host memory. Collective over its ranks.

        The caller closes it; what is still in use then ends with this object.
        """
        registered = self._find(process_set)
        base = self._own_world() if registered.handle is global_process_set else registered.base
        if base is None:
            raise UsageError(f"rank {self.rank} asked for a communicator of {process_set!r}, to which it is no party")
        made = base.split(range(base.size))
        assert made is not None
        self._made.add(made)
        return made

    def close(self) -> None:
        """End all sets but the global one, which goes on with the next context. Idempotent."""
        for made in list(self._made):
            made.close()
        for number in [number for number in self._registered if number]:
            self._close(self._registered.pop(number))
        global_process_set._registry = global_process_set.scope = None

    def forget_scopes(self) -> None:
        """Let no operation of a set begin any more: the runtime ends, or this is a forked child, which is no rank."""
        for registered in self._registered.values():
            registered.handle.scope = None

    def _own_world(self) -> Communicator:
        if self._world is None:
            self._world = self._make_world()
        return self._world

    @staticmethod
    def _close(registered: _Registered) -> None:
        registered.handle.process_set_id = None
        registered.handle._registry = registered.handle.scope = None
        if registered.operations is not None:
            registered.operations.close()
        if registered.base is not None:
            registered.base.close()

    def _find(self, process_set: ProcessSet) -> _Registered:
        number = process_set.process_set_id
        if number is None or number not in self._registered:
            raise OperationError(
                f"{process_set!r} is not registered (seen on rank {self.rank}); every rank passes it to "
                "init(process_sets=[...]) or calls add_process_set"
            )
        return self._registered[number]

    def _check_agreed(self, ranks: list[int]) -> None:
        everyone = objects.allgather_object(self._operations, ranks, name="process_set.add")
        if any(other != ranks for other in everyone):
            listed = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(everyone))
            raise MismatchError(f"the ranks add different process sets ({listed}). Add the same set on every rank.")

    def _problem(self, ranks: list[int]) -> str:
        size = self._size
        unknown = [rank for rank in ranks if not 0 <= rank < size]
        if not ranks:
            return "a process set needs at least one rank"
        if unknown or len(set(ranks)) != len(ranks):
            return f"there are ranks 0 to {size - 1}, each at most once"
        for registered in self._registered.values():
            if registered.handle.ranks == ranks:
                return f"{registered.handle!r} has the same ranks ({format_ranks(ranks)}) already"
        return ""
