"""The collectives as operations that compiled programs call; their arithmetic is in `unidist_arrays.operations`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
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
from unidist_jax.spmd import summed


@dataclass(frozen=True, eq=False)
class NamedCollective(HostOperation):
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

    def check_whole_axis(self) -> None:
        """Raise UsageError if the operation is in a program over all ranks, and takes some of them only."""
        if self.process_set.process_set_id != 0:
            raise UsageError(
                f"{self.title} over a process set is in a program of ud.spmd, which is over all ranks: call it outside "
                "of the program"
            )


@dataclass(frozen=True, eq=False)
class AllReduce(NamedCollective):
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
        operations.prepare_allreduce(
            operands,
            self.name,
            op=self.op,
            prescale=self.prescale,
            postscale=self.postscale,
            process_set=self.process_set,
            outputs=results,
        ).wait()

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
            operations.PreparedOperations(present, requests, list).wait()

        return run

    @override
    def lowered(self, operands: Sequence[Any], axis: str) -> list[Any]:
        self.check_whole_axis()
        scaled = [_scaled(each, self.prescale) for each in operands]
        is_sum = self.op in (Op.Average, Op.Sum)
        reduced = summed(scaled, axis) if is_sum else [self._reduced(each, axis) for each in scaled]
        return [_scaled(each, self._after(axis)) for each in reduced]

    def _reduced(self, array: Any, axis: str) -> Any:
        if not array.size:
            return array
        if self.op is Op.Product:
            return jnp.prod(jax.lax.all_gather(array, axis), axis=0, dtype=array.dtype)
        if array.dtype.kind == "c":
            raise OperationError(f"{self.title}: complex numbers have no {self.op.name}")
        return (jax.lax.pmin if self.op is Op.Min else jax.lax.pmax)(array, axis)

    def _after(self, axis: str) -> float:
        return self.postscale / (jax.lax.axis_size(axis) if self.op is Op.Average else 1)


@dataclass(frozen=True, eq=False)
class Adasum(AllReduce):
    """The all-reduces of several arrays by Adasum, which looks at each array as a whole."""

    can_be_batched: ClassVar[bool] = False

    @override
    def lowered(self, operands: Sequence[Any], axis: str) -> list[Any]:
        return HostOperation.lowered(self, operands, axis)


@dataclass(frozen=True, eq=False)
class ReduceScatter(NamedCollective):
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
            _check_rows(self, each.shape)
        return [
            ShapeDtype((reducescatter_rows(each.shape[0], scope.size)[scope.rank], *each.shape[1:]), each.dtype)
            for each in operands
        ]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        operations.prepare_reducescatter(
            operands,
            self.name,
            op=self.op,
            prescale=self.prescale,
            postscale=self.postscale,
            process_set=self.process_set,
            outputs=results,
        ).wait()

    @override
    def lowered(self, operands: Sequence[Any], axis: str) -> list[Any]:
        self.check_whole_axis()
        size = jax.lax.axis_size(axis)
        reducescattering(self.op, prescale=1, postscale=1, size=size)
        after = self.postscale / (size if self.op is Op.Average else 1)
        found = []
        for each in operands:
            _check_divides(self, each.shape, size)
            scaled = _scaled(each, self.prescale)
            counted = scaled.astype(np.int32) if each.dtype == bool else scaled
            rows = jax.lax.psum_scatter(counted, axis, tiled=True) if each.size else counted[: each.shape[0] // size]
            found.append(_scaled(rows.astype(each.dtype), after))
        return found


@dataclass(frozen=True, eq=False)
class AllGather(NamedCollective):
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
        operations.prepare_allgather(operands, self.name, process_set=self.process_set, outputs=results).wait()

    @override
    def run_at_once(self, operands: Sequence[Array]) -> list[Array]:
        prepared = operations.prepare_allgather(operands, self.name, process_set=self.process_set)
        results = prepared.wait()
        self.rows.update(enumerate(prepared.rows))
        return results

    def own_start(self, rank: Any, place: int, operand: ShapeDtype) -> Any:
        """Return the first of a rank's rows in the result of an operand of this type.

        Args:
            rank: a number, or within a program over all ranks a scalar.
            place: of the operand.
            operand: its type.
        """
        if place in self.rows:
            return sum(self.rows[place][:rank])
        return rank * (operand.shape[0] if operand.shape else 1)

    @override
    def lowered(self, operands: Sequence[Any], axis: str) -> list[Any]:
        self.check_whole_axis()
        return [_gathered(each if each.ndim else each[None], axis) for each in operands]


@dataclass(frozen=True, eq=False)
class Broadcast(NamedCollective):
    """The broadcasts of several arrays."""

    root_rank: int

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        scope_of(self.process_set).root(self.root_rank)
        return list(operands)

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        operations.prepare_broadcast(
            operands, self.name, root_rank=self.root_rank, process_set=self.process_set, outputs=results
        ).wait()

    @override
    def lowered(self, operands: Sequence[Any], axis: str) -> list[Any]:
        self.check_whole_axis()
        is_root = jax.lax.axis_index(axis) == scope_of(self.process_set).root(self.root_rank)
        return summed([jnp.where(is_root, each, jnp.zeros_like(each)) for each in operands], axis)


@dataclass(frozen=True, eq=False)
class AllToAll(NamedCollective):
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
        self._check(rows.shape, size)
        return [rows]

    def _check(self, shape: tuple[int, ...], size: int) -> None:
        if self.splits is not None:
            raise UsageError(
                f"{self.title} with splits= within a compiled function: the shape of the result would depend on the "
                "other ranks. Leave splits out, for equal shares, or call it outside of the compiled function"
            )
        _check_divides(self, shape, size)

    @override
    def lowered(self, operands: Sequence[Any], axis: str) -> list[Any]:
        self.check_whole_axis()
        [rows] = operands
        self._check(rows.shape, jax.lax.axis_size(axis))
        return [jax.lax.all_to_all(rows, axis, 0, 0, tiled=True) if rows.size else rows]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        received = np.empty((scope_of(self.process_set).size,), np.int32)
        operations.prepare_alltoall(
            operands, self.name, process_set=self.process_set, outputs=[results[0], received]
        ).wait()

    @override
    def run_at_once(self, operands: Sequence[Array]) -> list[Array]:
        given = list(operands) if self.splits is None else [*operands, self.splits]
        rows, received = operations.prepare_alltoall(given, self.name, process_set=self.process_set).wait()
        self.received[:] = [received]
        return [rows]

    def reversed(self) -> AllToAll:
        """Return the operation that brings the rows of the result back to where they came from."""
        return AllToAll(f"{self.name}.grad", self.process_set, self.received[0] if self.received else None)


@dataclass(frozen=True, eq=False)
class Barrier(NamedCollective):
    """A barrier, without operands or results."""

    matched_by_order: ClassVar[bool] = True

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        scope_of(self.process_set)
        return []

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        operations.prepare_barrier([], self.name, process_set=self.process_set).wait()


@dataclass(frozen=True, eq=False)
class MessageSend(HostOperation):
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
        operations.prepare_send(operands, "", to=self.to).wait()


@dataclass(frozen=True, eq=False)
class MessageReceive(HostOperation):
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
        operations.prepare_receive(operands, "", source=self.source, outputs=results).wait()


def _check_divides(operation: NamedCollective, shape: tuple[int, ...], size: int) -> None:
    """Raise OperationError unless an array has as many rows for each rank."""
    _check_rows(operation, shape)
    if shape[0] % size:
        raise OperationError(f"{operation.title}: {shape[0]} rows do not divide over {size} ranks")


def _gathered(array: Any, axis: str) -> Any:
    if not array.size:
        return jnp.zeros((jax.lax.axis_size(axis) * array.shape[0], *array.shape[1:]), array.dtype)
    return jax.lax.all_gather(array, axis, tiled=True)


def _scaled(array: Any, factor: float) -> Any:
    """Return an array times a factor; whole numbers are multiplied as floating-point ones, and truncated."""
    if factor == 1.0:
        return array
    if jnp.issubdtype(array.dtype, jnp.inexact):
        return array * np.asarray(factor, array.dtype)
    return (array.astype(jnp.float64 if jax.config.jax_enable_x64 else jnp.float32) * factor).astype(array.dtype)


def _check_rows(operation: NamedCollective, shape: tuple[int, ...]) -> None:
    if not shape:
        raise OperationError(f"{operation.title} divides rows; a scalar has none")


def _check_peer(title: str, rank: int) -> None:
    size = context.current().topology.world_size
    if not 0 <= rank < size:
        raise OperationError(f"{title}: choices: 0 to {size - 1}")
