"""Moving tensors by name: all-gather, broadcast, all-to-all; barrier, join; and send and recv. See `operations`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from unidist.errors import OperationError
from unidist.horovod_api.gather_advice import GatherAdvice
from unidist.horovod_api.scope import scope_of
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist.runtime import context
from unidist_arrays.operations import (
    prepare_allgather,
    prepare_alltoall,
    prepare_barrier,
    prepare_broadcast,
    prepare_join,
    prepare_receive,
    prepare_send,
)
from unidist_tensorflow.operations.dispatch import apply, as_tensor, execute
from unidist_tensorflow.operations.errors import as_op_errors
from unidist_tensorflow.operations.reductions import Average, allreduce, grouped_allreduce

# All-gather


def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> tf.Tensor:
    """Return the tensors of all ranks concatenated along dim 0, in rank order. Dim 0 may differ between ranks.

    Differentiable; the gradient is averaged over the ranks, as Horovod's is.

    Args:
        tensor: all dims but the first are equal on every rank; a scalar counts as one row.
        name: by which the ranks match the operation.
        ignore_name_scope: in graphs, leave name scopes out of the name by which ranks match.
        process_set: the ranks that take part.
    """
    return allgather_together([as_tensor(tensor)], name, ignore_name_scope, process_set, kind="Allgather")[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Return the all-gathers of several tensors, which are submitted together. See `allgather`."""
    if not tensors:
        return []
    return allgather_together([as_tensor(tensor) for tensor in tensors], name, ignore_name_scope, process_set)


def allgather_together(
    tensors: Sequence[tf.Tensor],
    name: str | None,
    ignore_name_scope: bool,
    process_set: ProcessSet,
    *,
    kind: str = "GroupedAllgather",
) -> list[tf.Tensor]:
    """Return the all-gathers of tensors of any types, in one exchange. For this package."""

    def run(*inputs: tf.Tensor) -> list[tf.Tensor]:
        return execute(
            partial(prepare_allgather, process_set=process_set),
            inputs,
            [tf.TensorSpec(_any_rows(tensor.shape), tensor.dtype) for tensor in inputs],
            kind=kind,
            name=name,
            process_set=process_set,
            grouped=True,
            ignore_name_scope=ignore_name_scope,
        )

    def backward(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        context.current().owned(GatherAdvice).give()
        reduced = grouped_allreduce(gradients, op=Average, process_set=process_set, ignore_name_scope=ignore_name_scope)
        counts = tf.stack([tf.shape(tensor)[0] if tensor.shape.rank else 1 for tensor in tensors])
        everywhere = allgather(counts[tf.newaxis], None, ignore_name_scope, process_set)  # (size, len(tensors))
        starts = tf.reduce_sum(everywhere[: scope_of(process_set).rank], axis=0)
        return [
            tf.reshape(each[starts[index] : starts[index] + counts[index]], tf.shape(tensor))
            for index, (each, tensor) in enumerate(zip(reduced, tensors, strict=True))
        ]

    return apply(run, backward, *tensors)


# Broadcast


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return rank `root_rank`'s tensor on every rank. Differentiable.

    Args:
        tensor: of the same shape on every rank.
        root_rank: a world rank, also where a process set is given.
        name: by which the ranks match the operation.
        ignore_name_scope: in graphs, leave name scopes out of the name by which ranks match.
        process_set: the ranks that take part.
    """

    def backward(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        averaged = allreduce(gradients[0], op=Average, process_set=process_set, ignore_name_scope=ignore_name_scope)
        if context.current().topology.rank == root_rank:
            return [averaged]
        with tf.control_dependencies([averaged]):  # else this rank's part of the all-reduce would not be run in graphs
            return [tf.zeros_like(averaged)]

    def run(*inputs: tf.Tensor) -> list[tf.Tensor]:
        return _broadcast(inputs, root_rank, name, ignore_name_scope, process_set, kind="Broadcast")

    return apply(run, backward, as_tensor(tensor))[0]


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[tf.Tensor]:
    """Replace the variables' values by rank `root_rank`'s, all in one exchange; returns the new values.

    In a TF1 graph the values are replaced when what is returned is run.

    Args:
        variables: of equal shapes and types on every rank, in the same order.
        root_rank: a world rank, also where a process set is given.
        name: by which the ranks match the operation.
        process_set: the ranks that take part.
    """
    if not variables:
        return []
    values = [as_tensor(variable) for variable in variables]
    received = _broadcast(values, root_rank, name, False, process_set, kind="BroadcastInplace")
    assigned = []
    for variable, value in zip(variables, received, strict=True):
        done = variable.assign(value)
        if tf.executing_eagerly() or done is None or getattr(tf.compat.v1.get_default_graph(), "building_function", 0):
            assigned.append(value)  # a function runs the assignment in any case
        else:
            with tf.control_dependencies([done]):
                assigned.append(tf.identity(value))
    return assigned


def _broadcast(
    tensors: Sequence[tf.Tensor],
    root_rank: int,
    name: str | None,
    ignore_name_scope: bool,
    process_set: ProcessSet,
    *,
    kind: str,
) -> list[tf.Tensor]:
    return execute(
        partial(prepare_broadcast, root_rank=root_rank, process_set=process_set),
        tensors,
        [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors],
        kind=kind,
        name=name,
        process_set=process_set,
        grouped=True,
        ignore_name_scope=ignore_name_scope,
    )


# All-to-all


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[i]` rows to rank i and return the rows received, in rank order. Differentiable.

    Args:
        tensor: `(rows, ...)`; all dims but the first equal on every rank.
        splits: rows for each rank, whole numbers that add up to dim 0, a tensor or a list; rows behind their sum stay.
            Default: equal shares.
        name: by which the ranks match the operation.
        ignore_name_scope: in graphs, leave name scopes out of the name by which ranks match.
        process_set: the ranks that take part.

    Returns:
        The rows received; with `splits` also how many came from each rank, `(size,)` int32, as Horovod does.
    """
    operand = as_tensor(tensor)
    with as_op_errors():  # where the graph is built, if that is known there
        if operand.shape.rank == 0:
            raise OperationError("alltoall divides rows; a scalar has none")
        shares = [] if splits is None else [_rows_of(splits)]

    def run(*inputs: tf.Tensor) -> list[tf.Tensor]:
        return execute(
            partial(prepare_alltoall, process_set=process_set),
            [*inputs, *shares],
            [
                tf.TensorSpec(_any_rows(operand.shape), operand.dtype),
                tf.TensorSpec([scope_of(process_set).size if context.is_initialized() else None], tf.int32),
            ],
            kind="Alltoall",
            name=name,
            process_set=process_set,
            ignore_name_scope=ignore_name_scope,
        )

    received: list[tf.Tensor] = []

    def run_and_keep(*inputs: tf.Tensor) -> list[tf.Tensor]:
        received[:] = run(*inputs)
        return received

    def backward(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        returned, _ = alltoall(gradients[0], received[1], None, ignore_name_scope, process_set)
        if not shares:
            return [returned]
        kept = tf.shape(operand)[0] - tf.shape(returned)[0]  # rows that were not sent
        ends = [[0, kept]] + [[0, 0]] * (operand.shape.rank - 1) if operand.shape.rank else None
        return [returned if ends is None else tf.pad(returned, ends)]

    rows, counts = apply(run_and_keep, backward, operand)
    return rows if splits is None else (rows, counts)


# Without data, and without names


def barrier(process_set: ProcessSet = global_process_set) -> tf.Operation | None:
    """Return when every rank of the process set has called it; in a TF1 graph, return the operation that does."""
    results = execute(
        partial(prepare_barrier, process_set=process_set),
        [],
        [],
        kind="Barrier",
        name=None,
        process_set=process_set,
        in_program_order=True,
    )
    return results[0].op if results else None


def join() -> tf.Tensor:
    """Report that this rank has run out of data, and return when every rank has; the result is the last one to say so.

    Until then it takes part with zeros in what the others do: sums and averages by name (averages still divide by the
    number of all ranks, as Horovod's do). Other operations that they start end there with MismatchError.
    """
    return execute(
        prepare_join,
        [],
        [tf.TensorSpec([], tf.int32)],
        kind="Join",
        name=None,
        process_set=global_process_set,
        in_program_order=True,
    )[0]


def send(tensor: Any, dst: int) -> tf.Operation | None:
    """Send a tensor to rank `dst`, which calls `recv`; in a TF1 graph, return the operation that sends it.

    Messages have no names: they are matched by their order. A `tf.function` keeps the order of the program; in a TF1
    graph order them with control dependencies.
    """
    results = execute(
        partial(prepare_send, to=dst),
        [as_tensor(tensor)],
        [],
        kind="Send",
        name=None,
        process_set=global_process_set,
        in_program_order=True,
    )
    return results[0].op if results else None


def recv(tensor: Any, src: int) -> tf.Tensor:
    """Return the next message of rank `src`. See `send`.

    Args:
        tensor: of the message's shape and dtype. A variable gets the message for its value.
        src: the rank that sends.
    """
    like = as_tensor(tensor)
    [message] = execute(
        partial(prepare_receive, source=src),
        [like],
        [tf.TensorSpec(like.shape, like.dtype)],
        kind="Recv",
        name=None,
        process_set=global_process_set,
        in_program_order=True,
    )
    if isinstance(tensor, tf.Variable):
        assigned = tensor.assign(message)
        if not tf.executing_eagerly():
            with tf.control_dependencies([assigned]):
                return tf.identity(message)
    return message


def _rows_of(splits: Any) -> tf.Tensor:
    """Return the numbers of rows for each rank, `(size,)` int32.

    Raises:
        OperationError: they are not whole numbers in one row.
    """
    rows = tf.convert_to_tensor(splits, dtype=None if tf.is_tensor(splits) or len(splits) else tf.int32)
    if not rows.dtype.is_integer or rows.shape.rank not in (1, None):
        raise OperationError(
            f"alltoall: splits of {rows.dtype.name} and shape {rows.shape}; give a whole number of rows for each rank"
        )
    return tf.cast(rows, tf.int32)


def _any_rows(shape: tf.TensorShape) -> tf.TensorShape:
    """Return the static shape of tensors that are gathered along dim 0."""
    return shape if shape.rank is None else tf.TensorShape([None]).concatenate(shape[1:])
