"""The collectives as operations that compiled programs call; their arithmetic is in `unidist_arrays.operations`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from typing_extensions import override

from unidist.errors import OperationError, UsageError
from unidist.horovod_api.reduce_ops import Op, allreduction, reducescattering
from unidist.horovod_api.scope import Scope, scope_of
from unidist.negotiation import Request, reducescatter_rows
from unidist.negotiation.process_sets import ProcessSet
from unidist.runtime import context
from unidist_arrays import operations
from unidist_arrays.memory import Array
from unidist_jax.compiled import HostOperation, ShapeDtype


@dataclass(frozen=True, eq=False)
class Collective(HostOperation):
    """A collective over a process set, by name.

    Args:
        name: by which the ranks match it.
        process_set: the ranks that take part.
    """

    name: str
    process_set: ProcessSet

    @property
    @override
    def title(self) -> str:
        return f"{type(self).__name__.lower()} {self.name!r}"


@dataclass(frozen=True, eq=False)
class AllReduce(Collective):
    """The all-reduces of several arrays."""

    op: Op
    prescale: float
    postscale: float

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        size = scope_of(self.process_set).size
        allreduction(self.op, prescale=1, postscale=1, size=size, process_set=self.process_set)
        return list(operands)

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        operations.start_allreduce(
            operands,
            self.name,
            op=self.op,
            prescale=self.prescale,
            postscale=self.postscale,
            process_set=self.process_set,
            outputs=results,
        ).wait()


@dataclass(frozen=True, eq=False)
class Adasum(AllReduce):
    """The all-reduces of several arrays by Adasum, which looks at each array as a whole."""

    can_be_batched: ClassVar[bool] = False

    @override
    def prepared(self, operands: Sequence[Array], results: Sequence[Array]) -> Callable[[], None]:
        if self.prescale != 1.0:
            return super().prepared(operands, results)
        scope: Scope | None = None
        requests: list[Request] = []

        def run() -> None:
            nonlocal scope, requests
            present = scope_of(self.process_set)
            if present is not scope:  # of another generation of the job, or the first call
                scope = present
                requests = operations.allreduce_requests(
                    operands,
                    results,
                    self.name,
                    op=self.op,
                    prescale=1.0,
                    postscale=self.postscale,
                    process_set=self.process_set,
                )
            operations.Pending([present.submit(each, background=False) for each in requests], list).wait()

        return run


@dataclass(frozen=True, eq=False)
class ReduceScatter(Collective):
    """The reduce-scatters of several arrays."""

    batched_at: ClassVar[int | None] = 1

    op: Op
    prescale: float
    postscale: float

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        scope = scope_of(self.process_set)
        reducescattering(self.op, prescale=1, postscale=1, size=scope.size)
        for each in operands:
            _check_rows(self, each)
        return [
            ShapeDtype((reducescatter_rows(each.shape[0], scope.size)[scope.rank], *each.shape[1:]), each.dtype)
            for each in operands
        ]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        operations.start_reducescatter(
            operands,
            self.name,
            op=self.op,
            prescale=self.prescale,
            postscale=self.postscale,
            process_set=self.process_set,
            outputs=results,
        ).wait()


@dataclass(frozen=True, eq=False)
class AllGather(Collective):
    """The all-gathers of several arrays, each of as many rows on every rank where a program is compiled.

    Args:
        rows: by operand, how many rows each rank gave when it was last called at once.
    """

    batched_at: ClassVar[int | None] = 1

    rows: dict[int, Sequence[int]] = field(default_factory=dict)

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        size = scope_of(self.process_set).size
        return [
            ShapeDtype((size * each.shape[0], *each.shape[1:]) if each.shape else (size,), each.dtype)
            for each in operands
        ]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        operations.start_allgather(operands, self.name, process_set=self.process_set, outputs=results).wait()

    @override
    def run_at_once(self, operands: Sequence[Array]) -> list[Array]:
        pending = operations.start_allgather(operands, self.name, process_set=self.process_set)
        results = pending.wait()
        self.rows.update(enumerate(pending.rows))
        return results

    def own_rows(self, place: int, operand: ShapeDtype) -> slice:
        """Return which rows of the result of an operand of this type are this rank's."""
        rank, rows = scope_of(self.process_set).rank, operand.shape[0] if operand.shape else 1
        start = sum(self.rows[place][:rank]) if place in self.rows else rank * rows
        return slice(start, start + rows)


@dataclass(frozen=True, eq=False)
class Broadcast(Collective):
    """The broadcasts of several arrays."""

    root_rank: int

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        scope_of(self.process_set).root(self.root_rank)
        return list(operands)

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        operations.start_broadcast(
            operands, self.name, root_rank=self.root_rank, process_set=self.process_set, outputs=results
        ).wait()


@dataclass(frozen=True, eq=False)
class AllToAll(Collective):
    """An all-to-all of one array, of equal numbers of rows for every rank where a program is compiled.

    Args:
        splits: rows for each rank; None: equal numbers.
        received: how many rows came from each rank when it was last called at once, and nothing before.
    """

    batched_at: ClassVar[int | None] = 1

    splits: Array | None = None
    received: list[Array] = field(default_factory=list)

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        size = scope_of(self.process_set).size
        [rows] = operands
        _check_rows(self, rows)
        if self.splits is not None:
            raise UsageError(
                f"{self.title} with splits= within a compiled function: the shape of the result would depend on the "
                "other ranks. Leave splits out, for equal shares, or call it outside of the compiled function"
            )
        if rows.shape[0] % size:
            raise OperationError(f"{self.title}: {rows.shape[0]} rows do not divide over {size} ranks")
        return [rows]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        received = np.empty((scope_of(self.process_set).size,), np.int32)
        operations.start_alltoall(
            operands, self.name, process_set=self.process_set, outputs=[results[0], received]
        ).wait()

    @override
    def run_at_once(self, operands: Sequence[Array]) -> list[Array]:
        given = list(operands) if self.splits is None else [*operands, self.splits]
        rows, received = operations.start_alltoall(given, self.name, process_set=self.process_set).wait()
        self.received[:] = [received]
        return [rows]

    def reversed(self) -> AllToAll:
        """Return the operation that brings the rows of the result back to where they came from."""
        return AllToAll(f"{self.name}.grad", self.process_set, self.received[0] if self.received else None)


@dataclass(frozen=True, eq=False)
class Barrier(Collective):
    """A barrier, without operands or results."""

    matched_by_order: ClassVar[bool] = True

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        scope_of(self.process_set)
        return []

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        operations.start_barrier([], self.name, process_set=self.process_set).wait()


@dataclass(frozen=True, eq=False)
class Send(HostOperation):
    """A message to a rank."""

    matched_by_order: ClassVar[bool] = True

    to: int

    @property
    @override
    def title(self) -> str:
        return f"send to rank {self.to}"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        _check_peer(self.title, self.to)
        return []

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        operations.start_send(operands, "", to=self.to).wait()


@dataclass(frozen=True, eq=False)
class Receive(HostOperation):
    """A message from a rank, of the type of the operand."""

    matched_by_order: ClassVar[bool] = True

    source: int

    @property
    @override
    def title(self) -> str:
        return f"recv from rank {self.source}"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        _check_peer(self.title, self.source)
        return list(operands)

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        operations.start_receive(operands, "", source=self.source, outputs=results).wait()


def _check_rows(operation: Collective, operand: ShapeDtype) -> None:
    if not operand.shape:
        raise OperationError(f"{operation.title} divides rows; a scalar has none")


def _check_peer(title: str, rank: int) -> None:
    size = context.current().topology.world_size
    if not 0 <= rank < size:
        raise OperationError(f"{title}: choices: 0 to {size - 1}")
