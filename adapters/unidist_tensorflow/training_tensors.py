"""Gradients as tensors on one side, a fused exchange of arrays on the other: in eager mode and in graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from unidist_tensorflow import graph
from unidist_tensorflow.errors import as_op_errors
from unidist_tensorflow.memory import NUMPY_DTYPES, Array, array_of, tensor_of_array
from unidist_tensorflow.training_exchange import FusedExchange, Result, nothing
from unidist_tensorflow.training_slices import Slices

EXCHANGE_NAME = "unidist_exchange_of_gradients_which_needs_jit_compile_False"
"""Of the node in graphs; XLA, which cannot call into the host, names it in its error."""

Gradient = Any
"""A `tf.Tensor` or a `tf.IndexedSlices`."""


def exchange_eagerly(exchange: FusedExchange, own: Mapping[int, Gradient]) -> Result:
    """Run the exchange with this rank's gradients by place."""
    arrays: dict[int, Array | Slices] = {}
    for place, gradient in own.items():
        if isinstance(gradient, tf.IndexedSlices):
            arrays[place] = Slices(array_of(gradient.values), array_of(tf.cast(gradient.indices, tf.int64)))
        else:
            arrays[place] = array_of(gradient)
    with as_op_errors():
        return exchange.run(arrays)


def tensor_of(exchange: FusedExchange, result: Result, place: int, *, sparse: bool) -> Gradient | None:
    """Return a gradient that came out of an exchange, in the form wanted; None where no rank had one."""
    gradient = result.gradients[place]
    if gradient is None:
        return None
    shape = exchange.variables[place].shape
    formed = _formed(gradient, shape, sparse=sparse)
    if isinstance(formed, Slices):
        return tf.IndexedSlices(tensor_of_array(formed.values), tensor_of_array(formed.indices), tf.constant(shape))
    return tensor_of_array(formed)


def exchange_in_graph(
    exchange: FusedExchange, own: Mapping[int, Gradient], wanted: Sequence[int]
) -> tuple[tf.Tensor, tf.Tensor, list[Gradient]]:
    """Add the exchange to the graph that is being built.

    The node blocks until all ranks run theirs. It cannot hang: `tf.function` runs such nodes in program order, so
    all ranks come to the same one; what else waits for peers (`graph`) does so on threads of its own.

    Args:
        exchange: what runs.
        own: this rank's gradients by place.
        wanted: places of the gradients to return.

    Returns:
        Whether the step is complete, a bool; for each wanted place whether any rank had a gradient, `(wanted,)`
        bool; and the gradients, in the form of this rank's own. One that no rank had is zeros.
    """
    places = sorted(own)
    sparse = {place for place in places if isinstance(own[place], tf.IndexedSlices)}
    inputs: list[tf.Tensor] = []
    for place in places:
        gradient = own[place]
        if isinstance(gradient, tf.IndexedSlices):
            inputs += [gradient.values, tf.cast(gradient.indices, tf.int64)]
        else:
            inputs.append(gradient)

    def run(*arrays: Any) -> list[Array]:
        given = iter([np.asarray(array) for array in arrays])
        arguments: dict[int, Array | Slices] = {
            place: Slices(next(given), next(given)) if place in sparse else next(given) for place in places
        }
        try:
            result = exchange.run(arguments)
        except Exception as exc:
            graph.remember_failure(exc)
            raise
        outputs = [
            np.asarray(result.complete),
            np.array([result.gradients[place] is not None for place in wanted], bool),
        ]
        for place in wanted:
            outputs += _outputs(exchange, result, place, sparse=place in sparse)
        return outputs

    types: list[tf.DType] = [tf.bool, tf.bool]
    shapes: list[Any] = [[], [len(wanted)]]
    for place in wanted:
        info = exchange.variables[place]
        dtype = tf.as_dtype(NUMPY_DTYPES[info.dtype])
        types += [dtype, tf.int64] if place in sparse else [dtype]
        shapes += [[None, *info.shape[1:]], [None]] if place in sparse else [info.shape]
    with tf.device("CPU:0"):
        outputs = tf.numpy_function(run, inputs, types, name=EXCHANGE_NAME)
    for output, shape in zip(outputs, shapes, strict=True):
        output.set_shape(shape)
    complete, present, *rest = outputs
    gradients: list[Gradient] = []
    for place in wanted:
        if place in sparse:
            values, indices = rest.pop(0), rest.pop(0)
            gradients.append(tf.IndexedSlices(values, indices, tf.constant(exchange.variables[place].shape)))
        else:
            gradients.append(rest.pop(0))
    return complete, present, gradients


def _outputs(exchange: FusedExchange, result: Result, place: int, *, sparse: bool) -> list[Array]:
    info = exchange.variables[place]
    gradient = result.gradients[place]
    if gradient is None:
        gradient = nothing(info, sparse=sparse)
    formed = _formed(gradient, info.shape, sparse=sparse)
    return [formed.values, formed.indices] if isinstance(formed, Slices) else [formed]


def _formed(gradient: Array | Slices, shape: Sequence[int], *, sparse: bool) -> Array | Slices:
    """Return a gradient as slices or dense, whatever it is."""
    if sparse:
        return Slices.of(gradient)
    return gradient.dense(shape) if isinstance(gradient, Slices) else gradient
