"""Runs an operation at once in eager mode, or as a node in graphs; with its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record  # the public API cannot say whether a tape is recording

from unidist.horovod_api.scope import scope_of
from unidist.negotiation.process_sets import ProcessSet
from unidist.runtime import context
from unidist_arrays.operations import Prepare
from unidist_tensorflow.memory import array_of, dtype_of, tensor_of_array
from unidist_tensorflow.operations import graph
from unidist_tensorflow.operations.errors import as_op_errors

Backward = Callable[[list[Any]], Sequence[Any]]
"""Makes the gradients of the inputs from those of the outputs."""


def execute(
    prepare: Prepare,
    tensors: Sequence[Any],
    outputs: Sequence[tf.TensorSpec],
    *,
    kind: str,
    name: str | None,
    process_set: ProcessSet,
    grouped: bool = False,
    ignore_name_scope: bool = False,
    in_program_order: bool = False,
) -> list[tf.Tensor]:
    """Run an operation on tensors. Collective.

    Args:
        prepare: prepares it, given arrays.
        tensors: its inputs, `tf.Tensor`s.
        outputs: types and static shapes of its results, for graphs.
        kind: Horovod's word for the operation ("Allreduce"), of which a name is made where none was given.
        name: by which the ranks match the operation.
        process_set: the ranks that take part.
        grouped: all tensors are equals; else the first one is the operand.
        ignore_name_scope: see `graph.detached`.
        in_program_order: see `graph.detached`.

    Raises:
        OperationError: the process set is not registered.
        MismatchError: the ranks' calls differ. In eager mode also a `tf.errors.FailedPreconditionError`.
        PeerLostError: a rank is gone. In eager mode also a `tf.errors.UnknownError`.
    """
    if not tf.executing_eagerly():
        if context.is_initialized():  # else the graph is run later, and says it then
            context.current().process_sets.check_registered(process_set)
        chosen = name or graph.default_name(f"Horovod{kind}", *(tensors if grouped else tensors[:1]))
        return graph.detached(
            prepare,
            tensors,
            outputs,
            name=chosen,
            ignore_name_scope=ignore_name_scope,
            in_program_order=in_program_order,
        )
    with as_op_errors():
        given = scope_of(process_set).name(kind.lower(), name)
        return [tensor_of_array(array) for array in prepare([array_of(tensor) for tensor in tensors], given).wait()]


def apply(run: Callable[..., Sequence[tf.Tensor]], backward: Backward, *tensors: tf.Tensor) -> list[tf.Tensor]:
    """Return `run(*tensors)`, a list of tensors; the gradients of the inputs are `backward(gradients of the outputs)`.

    Every rank runs backward through it too: the backward operation is collective as well.
    """
    if tf.executing_eagerly() and not record.could_possibly_record():
        return list(run(*tensors))

    @tf.custom_gradient
    def operation(*inputs: tf.Tensor) -> Any:
        results = list(run(*inputs))

        def gradients(*upstream: Any) -> list[Any]:
            return list(backward([_dense(each, result) for each, result in zip(upstream, results, strict=True)]))

        return results, gradients

    return list(operation(*tensors))


def as_tensor(value: Any) -> tf.Tensor:
    """Return a tensor, variable or array as a tensor of an element type that can be exchanged."""
    tensor = tf.convert_to_tensor(value)
    with as_op_errors():
        dtype_of(tensor)
    return tensor


def _dense(gradient: Any, result: tf.Tensor) -> tf.Tensor:
    return tf.zeros_like(result) if gradient is None else tf.convert_to_tensor(gradient)
