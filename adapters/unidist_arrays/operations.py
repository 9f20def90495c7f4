"""Operations on arrays: each function prepares one, and returns an object that starts it and waits for it.

The same functions serve eager code and compiled programs. Requests are submitted in the foreground: the thread that
waits moves them, so no operation pays for a switch to a background thread. Who waits at once need not start them.

Results are written to new memory, or to that of the argument `outputs`: programs that were compiled for fixed shapes
have it ready. There an all-gather or all-to-all whose result has other rows is an OperationError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from unidist.algorithms import scale_in_place
from unidist.buffer import Buffer
from unidist.errors import OperationError
from unidist.horovod_api.reduce_ops import Op, allreduction, reducescattering
from unidist.horovod_api.scope import Scope, scope_of
from unidist.negotiation import NamedHandle, OperationKind, Request, reducescatter_rows
from unidist.negotiation.process_sets import ProcessSet
from unidist.runtime import context
from unidist_arrays.memory import Array, address_of, buffer_of_array, empty_array

__all__ = [
    "Prepare",
    "PreparedCall",
    "PreparedOperations",
    "allreduce_requests",
    "names_of_group",
    "prepare_allgather",
    "prepare_allreduce",
    "prepare_alltoall",
    "prepare_barrier",
    "prepare_broadcast",
    "prepare_join",
    "prepare_receive",
    "prepare_reducescatter",
    "prepare_send",
]


class PreparedOperations:
    """Operations that one call of a script asks for.

    Args:
        scope: the ranks that take part.
        requests: of each operation.
        collect: makes the results, when all have ended.
        inputs: kept alive until then.
    """

    def __init__(
        self,
        scope: Scope,
        requests: Sequence[Request],
        collect: Callable[[], list[Array]],
        inputs: Sequence[Array] = (),
    ) -> None:
        self._scope = scope
        self._requests = requests
        self._collect = collect
        self._inputs = inputs
        self._handles: list[NamedHandle] = []

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """How many rows came from each rank, by operation, once all have ended: of all-gathers and all-to-alls."""
        return [handle.rows for handle in self._handles]

    def start(self) -> Self:
        """Submit all; if one is refused, those before it end with the failure of the other ranks."""
        for request in self._requests:
            self._handles.append(self._scope.submit(request, background=False))
        return self

    def wait(self) -> list[Array]:
        """Return the results; every operation has ended then. Raises the first error."""
        if not self._handles and len(self._requests) == 1 and self._requests[0].allocate_output is None:
            self._scope.run(self._requests[0])
            return self._collect()
        error: BaseException | None = None
        for handle in self._handles or self.start()._handles:
            try:
                handle.wait()
            except Exception as exc:  # the others use memory that must not go away before they have ended
                error = error or exc
        if error is not None:
            raise error
        return self._collect()


def names_of_group(name: str, count: int) -> list[str]:
    """Return the names of the operations of a group; a single one has the name itself."""
    return [name] if count == 1 else [f"{name}.{index}" for index in range(count)]


def prepare_allreduce(
    arrays: Sequence[Array],
    name: str,
    *,
    op: Op,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    outputs: Sequence[Array] | None = None,
) -> PreparedOperations:
    """Prepare the all-reduces of several arrays; the engine fuses small ones."""
    scope = scope_of(process_set)
    results = list(outputs) if outputs is not None else [empty_array(array.shape, array.dtype) for array in arrays]
    arrays = [_scaled(array, prescale) for array in arrays]
    requests = allreduce_requests(
        arrays, results, name, op=op, prescale=prescale, postscale=postscale, process_set=process_set
    )
    return PreparedOperations(scope, requests, lambda: results, arrays)


def allreduce_requests(
    scaled: Sequence[Array],
    results: Sequence[Array],
    name: str,
    *,
    op: Op,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> list[Request]:
    """Return the requests of all-reduces, which may be submitted again and again while the arrays are there.

    Args:
        scaled: what is reduced, multiplied by `prescale` already.
        results: memory for the results, which may be the same.
        name: of the group.
        op: the reduction.
        prescale: the factor that was applied; the ranks compare it.
        postscale: for the results.
        process_set: the ranks that take part.
    """
    size = scope_of(process_set).size
    asked = allreduction(op, prescale=prescale, postscale=postscale, size=size, process_set=process_set)
    return [
        Request(
            *(each, asked.kind, buffer_of_array(array), buffer_of_array(output), array.shape),
            op=asked.op,
            scale=asked.scale,
            prescale=asked.prescale,
        )
        for each, array, output in zip(names_of_group(name, len(scaled)), scaled, results, strict=True)
    ]


def prepare_reducescatter(
    arrays: Sequence[Array],
    name: str,
    *,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    outputs: Sequence[Array] | None = None,
) -> PreparedOperations:
    """Prepare the reduce-scatters of several arrays."""
    scope = scope_of(process_set)
    asked = reducescattering(op, prescale=prescale, postscale=postscale, size=scope.size)
    if any(not array.ndim for array in arrays):
        raise OperationError(f"reducescatter {name!r} divides rows; a scalar has none")
    results = list(outputs or ()) or [
        empty_array((reducescatter_rows(array.shape[0], scope.size)[scope.rank], *array.shape[1:]), array.dtype)
        for array in arrays
    ]
    arrays = [_scaled(array, asked.prescale) for array in arrays]
    requests = [
        Request(
            *(each, asked.kind, buffer_of_array(array), buffer_of_array(output), array.shape),
            scale=asked.scale,
            prescale=asked.prescale,
        )
        for each, array, output in zip(names_of_group(name, len(arrays)), arrays, results, strict=True)
    ]
    return PreparedOperations(scope, requests, lambda: results, arrays)


def prepare_allgather(
    arrays: Sequence[Array], name: str, *, process_set: ProcessSet, outputs: Sequence[Array] | None = None
) -> PreparedOperations:
    """Prepare the all-gathers of several arrays; a scalar counts as one row."""
    scope = scope_of(process_set)
    arrays = [array if array.ndim else array.reshape(1) for array in arrays]
    given: Sequence[Array | None] = outputs or [None] * len(arrays)
    results = [_Rows(array, target) for array, target in zip(arrays, given, strict=True)]
    requests = [
        Request(
            each,
            OperationKind.ALLGATHER,
            source=buffer_of_array(array),
            shape=array.shape,
            allocate_output=result.allocate,
        )
        for each, array, result in zip(names_of_group(name, len(arrays)), arrays, results, strict=True)
    ]
    return PreparedOperations(scope, requests, lambda: [result.array(name) for result in results], arrays)


def prepare_broadcast(
    arrays: Sequence[Array],
    name: str,
    *,
    root_rank: int,
    process_set: ProcessSet,
    outputs: Sequence[Array] | None = None,
) -> PreparedOperations:
    """Prepare the broadcasts of several arrays of rank `root_rank`, a world rank."""
    scope = scope_of(process_set)
    root = scope.root(root_rank)
    results = list(outputs) if outputs is not None else [empty_array(array.shape, array.dtype) for array in arrays]
    if scope.rank == root:
        for output, array in zip(results, arrays, strict=True):
            if address_of(output) != address_of(array):
                np.copyto(output, array)
    requests = [
        Request(each, OperationKind.BROADCAST, target=buffer_of_array(output), shape=output.shape, root=root)
        for each, output in zip(names_of_group(name, len(arrays)), results, strict=True)
    ]
    return PreparedOperations(scope, requests, lambda: results)


def prepare_alltoall(
    arrays: Sequence[Array], name: str, *, process_set: ProcessSet, outputs: Sequence[Array] | None = None
) -> PreparedOperations:
    """Prepare an all-to-all of `arrays[0]`; `arrays[1]`, where given, has the rows for each rank.

    Its results are the rows received, and how many came from each rank, `(size,)` int32.
    """
    scope = scope_of(process_set)
    array = arrays[0]
    if not array.ndim:
        raise OperationError(f"alltoall {name!r} divides rows; a scalar has none")
    if len(arrays) > 1:
        splits = tuple(int(count) for count in arrays[1].reshape(-1))
        if 0 <= sum(splits) < array.shape[0]:
            array = array[: sum(splits)]  # the others stay here, as in Horovod
    elif array.shape[0] % scope.size:
        raise OperationError(
            f"alltoall {name!r}: {array.shape[0]} rows do not divide over {scope.size} ranks; pass splits"
        )
    else:
        splits = (array.shape[0] // scope.size,) * scope.size
    result = _Rows(array, outputs[0] if outputs else None)
    request = Request(
        name,
        OperationKind.ALLTOALL,
        source=buffer_of_array(array),
        shape=array.shape,
        splits=splits,
        allocate_output=result.allocate,
    )

    def collect() -> list[Array]:
        received = outputs[1] if outputs else empty_array((scope.size,), np.dtype(np.int32))
        received[:] = prepared.rows[0]
        return [result.array(name), received]

    prepared = PreparedOperations(scope, [request], collect, arrays)
    return prepared


def prepare_barrier(arrays: Sequence[Array], name: str, *, process_set: ProcessSet) -> PreparedOperations:
    """Prepare a barrier; it has no results."""
    del arrays  # there are none
    return PreparedOperations(scope_of(process_set), [Request(name, OperationKind.BARRIER)], list)


class PreparedCall:
    """An operation that blocks from start to end, so it starts when somebody waits for it.

    Args:
        call: returns the results.
    """

    def __init__(self, call: Callable[[], list[Array]]) -> None:
        self._call = call

    def start(self) -> Self:
        """Do nothing yet."""
        return self

    def wait(self) -> list[Array]:
        """Return the results."""
        return self._call()


def prepare_join(arrays: Sequence[Array], name: str) -> PreparedCall:
    """Prepare a join; its result is the rank that joined last, an int32 scalar."""
    del arrays, name  # a join has none
    return PreparedCall(lambda: [_int32(context.current().join())])


def prepare_send(arrays: Sequence[Array], name: str, *, to: int) -> PreparedCall:
    """Prepare a message to a rank; it has no results."""
    del name  # messages are matched by their order

    def call() -> list[Array]:
        context.current().world.send(buffer_of_array(arrays[0]), to=to).wait()
        return []

    return PreparedCall(call)


def prepare_receive(
    arrays: Sequence[Array], name: str, *, source: int, outputs: Sequence[Array] | None = None
) -> PreparedCall:
    """Prepare to receive a message of the size and dtype of `arrays[0]` from a rank."""
    del name  # messages are matched by their order

    def call() -> list[Array]:
        output = outputs[0] if outputs else empty_array(arrays[0].shape, arrays[0].dtype)
        context.current().world.recv(buffer_of_array(output), source=source).wait()
        return [output]

    return PreparedCall(call)


def _int32(value: int) -> Array:
    made = empty_array((), np.dtype(np.int32))
    made[...] = value
    return made


def _scaled(array: Array, factor: float) -> Array:
    """Return `array` times `factor` in new memory, or the array itself where there is nothing to multiply."""
    if factor == 1.0:
        return array
    scaled = empty_array(array.shape, array.dtype)
    np.copyto(scaled, array)
    scale_in_place(buffer_of_array(scaled), factor)
    return scaled


class _Rows:
    """The result of an operation whose rows are known when the ranks have agreed.

    Args:
        source: this rank's rows.
        given: memory for the result, or None.
    """

    def __init__(self, source: Array, given: Array | None) -> None:
        self._source, self._given = source, given
        self._made: Array | None = None
        self._counts: tuple[int, ...] = ()

    def allocate(self, rows: tuple[int, ...]) -> Buffer:
        """Return memory for so many rows of each rank."""
        shape = (sum(rows), *self._source.shape[1:])
        # Rows that differ are refused on every rank, also on one where their sum is what its program was compiled for.
        fits = self._given is not None and self._given.shape == shape and len(set(rows)) == 1
        self._counts = rows
        self._made = self._given if fits else empty_array(shape, self._source.dtype)
        assert self._made is not None
        return buffer_of_array(self._made)

    def array(self, name: str) -> Array:
        """Return the result, or raise OperationError if it is not what memory was given for."""
        assert self._made is not None
        if self._given is not None and self._made is not self._given:
            raise OperationError(
                f"{name!r}: the ranks give {', '.join(map(str, self._counts))} rows: within a compiled function all "
                "ranks must give equal numbers of rows. Call it outside of the compiled function"
            )
        return self._made


Prepare = Callable[[Sequence[Any], str], PreparedOperations | PreparedCall]
"""Starts operations on arrays under a name; one of the functions above with its options bound."""
