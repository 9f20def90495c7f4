"""Moving arrays by name: all-gather, broadcast, all-to-all; barrier, join, and send and recv. See `operations`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unidist.errors import OperationError
from unidist.horovod_api.gather_advice import GatherAdvice
from unidist.horovod_api.reduce_ops import Op
from unidist.horovod_api.scope import scope_of
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist.runtime import context
from unidist_jax.compiled import flush
from unidist_jax.jax_state import is_tracing
from unidist_jax.memory import jax_array
from unidist_jax.operations.calls import Leaves, call, leaves_of, name_of, only, own_place
from unidist_jax.operations.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    MessageReceive,
    MessageSend,
)


def allgather(tree: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the arrays of all ranks concatenated along dim 0, in rank order. Differentiable in reverse mode.

    Called at once, the ranks may give different numbers of rows. Within a compiled function all give as many, since the
    result's shape is part of the program; OperationError otherwise.

    Args:
        tree: arrays `(rows, ...)`, or a tree of them; all dims but the first are equal on every rank. A scalar counts
            as one row.
        name: by which the ranks match the operation.
        process_set: the ranks that take part.

    Returns:
        A tree like the argument. As in Horovod, the gradient is averaged over the ranks.
    """
    leaves, structure = leaves_of(tree)
    if not leaves:
        return tree
    operation = AllGather(name_of("allgather", name, leaves, process_set), process_set)

    def backward(gradients: list[Any]) -> Leaves:
        context.current().owned(GatherAdvice).give()
        reduced = call(AllReduce(f"{operation.name}.grad", process_set, Op.Average, 1.0, 1.0), gradients)
        floating = [place for place, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        own = own_place(process_set)
        starts = [operation.own_start(own, place, leaves[place]) for place in floating]
        return [
            jax.lax.dynamic_slice_in_dim(each, start, leaves[place].shape[0] if leaves[place].ndim else 1).reshape(
                leaves[place].shape
            )
            for each, start, place in zip(reduced, starts, floating, strict=True)
        ]

    return jax.tree.unflatten(structure, call(operation, leaves, backward))


def grouped_allgather(tensors: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the all-gathers of several arrays, exchanged together: `allgather` of a list, under Horovod's name."""
    return allgather(tensors, name, process_set)


def broadcast(tree: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return rank `root_rank`'s arrays on every rank. Differentiable in reverse mode.

    Args:
        tree: arrays or a tree of them, of the same structure, shapes and dtypes on every rank.
        root_rank: a world rank, also where a process set is given.
        name: by which the ranks match the operation.
        process_set: the ranks that take part.

    Returns:
        A tree like the argument. As in Horovod, the gradient is averaged over the ranks on the root, zero elsewhere.
    """
    leaves, structure = leaves_of(tree)
    if not leaves:
        return tree
    name = name_of("broadcast", name, leaves, process_set)

    def backward(gradients: list[Any]) -> Leaves:
        averaged = call(AllReduce(f"{name}.grad", process_set, Op.Average, 1.0, 1.0), gradients)
        is_root = own_place(process_set) == scope_of(process_set).root(root_rank)
        return [jnp.where(is_root, each, jnp.zeros_like(each)) for each in averaged]

    return jax.tree.unflatten(structure, call(Broadcast(name, process_set, root_rank), leaves, backward))


def alltoall(
    array: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[i]` rows to rank i and return the rows received, in rank order. Differentiable in reverse mode.

    Args:
        array: `(rows, ...)`; all dims but the first equal on every rank.
        splits: rows for each rank, whole numbers that add up to dim 0. Default: equal shares, the only choice within a
            compiled function.
        name: by which the ranks match the operation.
        process_set: the ranks that take part.

    Returns:
        The rows received; with `splits` also how many came from each rank, `(size,)` int32, as Horovod does.
    """
    leaves, _ = leaves_of(array)
    only(leaves, title="alltoall")
    given = None if splits is None else _whole_numbers(splits)
    operation = AllToAll(name_of("alltoall", name, leaves, process_set), process_set, given)

    def backward(gradients: list[Any]) -> Leaves:
        [returned] = call(operation.reversed(), gradients)
        kept = leaves[0].shape[0] - returned.shape[0]  # rows that stayed here
        return [jnp.pad(returned, [(0, kept)] + [(0, 0)] * (returned.ndim - 1)) if kept else returned]

    [rows] = call(operation, leaves, backward)
    return rows if splits is None else (rows, jax_array(operation.received[0]))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it; within a compiled function, run in its order."""
    if is_tracing():
        name = f"barrier.traced.{process_set.process_set_id}"  # the same for all: the calls of a program have an order
    else:
        name = scope_of(process_set).name("barrier", None)
    call(Barrier(name, process_set), [])


def join(device: int = -1) -> int:
    """Report that this rank has run out of data, and return when every rank has; returns the last one to say so.

    Until then it takes part with zeros in what the others do: sums and averages by name, and the updates of
    optimizers (averages still divide by the number of all ranks, as in Horovod). Other operations that
    they start end there with MismatchError. Not for use within compiled functions.

    Args:
        device: accepted for Horovod's sake; zeros are made where they are needed.
    """
    del device
    flush()
    return context.current().join()


def send(array: Any, dst: int) -> None:
    """Send an array to rank `dst`, which calls `recv`; within a compiled function, run in its order. No gradient."""
    leaves, _ = leaves_of(array)
    call(MessageSend(dst), [jax.lax.stop_gradient(only(leaves, title="send"))])


def recv(array: Any, src: int) -> Any:
    """Return the next message of rank `src`, of the shape and dtype of `array`, whose values do not matter.

    Within a compiled function it runs in the order of that function. It has no gradient.
    """
    leaves, _ = leaves_of(array)
    return call(MessageReceive(src), [jax.lax.stop_gradient(only(leaves, title="recv"))])[0]


def _whole_numbers(splits: Sequence[int] | Any) -> np.ndarray[Any, Any]:
    given = np.asarray(splits)
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        raise OperationError(f"alltoall: splits={splits!r}; give a whole number of rows for each rank, in a list")
    return given
