"""Gradients as tensors on one side, a fused exchange of arrays on the other: in eager mode and in graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
) -> tuple[tf.Tensor, dict[int, tf.Tensor], list[Gradient]]:
    """Add the exchange to the graph that is being built. Collective the first time.

    A node takes the gradients of a stage (a bucket of some) as soon as backward has made them, and another gives the
    reduced ones when the next stage has been taken: the optimizer goes on with them while backward goes on too. The
    last node takes what is left and completes the exchange.

    Nodes block until all ranks run theirs. They cannot hang: `tf.function` runs such nodes in program order, so
    all ranks come to the same one; what else waits for peers (`graph`) does so on threads of its own.

    Args:
        exchange: what runs.
        own: this rank's gradients by place.
        wanted: places of the gradients to return.

    Returns:
        Whether the step is complete, a bool; for each wanted place that this rank has no gradient for whether any
        other has, a bool; and the wanted gradients, in the form of this rank's own. One that no rank had is zeros.
    """
    sparse = {place for place, gradient in own.items() if isinstance(gradient, tf.IndexedSlices)}
    with as_op_errors():
        exchange.prepare(sparse)
    stages = exchange.stages(own.keys() - sparse)
    found: dict[int, Gradient] = {}
    for number, stage in enumerate(stages):
        _take_stage(exchange, number, stage, own)
        if number:
            found |= _complete_stage(exchange, number - 1, stages[number - 1])
    if stages:
        found |= _complete_stage(exchange, len(stages) - 1, stages[-1])
    left = [place for place in wanted if place not in found]
    complete, elsewhere, rest = _complete(exchange, own, left, without=frozenset(found))
    found |= rest
    return complete, elsewhere, [found[place] for place in wanted]


def _take_stage(exchange: FusedExchange, number: int, stage: Sequence[int], own: Mapping[int, Gradient]) -> None:
    def take(*arrays: Any) -> list[Array]:
        with _remembered():
            if number == 0:
                exchange.announce()
            exchange.take(dict(zip(stage, map(np.asarray, arrays), strict=True)))
        return []

    _node(take, [own[place] for place in stage], [])


def _complete_stage(exchange: FusedExchange, number: int, stage: Sequence[int]) -> dict[int, tf.Tensor]:
    def complete() -> list[Array]:
        with _remembered():
            return exchange.complete_stage(number, stage)

    infos = [exchange.variables[place] for place in stage]
    outputs = _node(complete, [], [tf.TensorSpec(info.shape, NUMPY_DTYPES[info.dtype]) for info in infos])
    return dict(zip(stage, outputs, strict=True))


def _complete(
    exchange: FusedExchange, own: Mapping[int, Gradient], wanted: Sequence[int], *, without: Collection[int]
) -> tuple[tf.Tensor, dict[int, tf.Tensor], dict[int, Gradient]]:
    """Add the node that completes the exchange, `without` the places that are complete."""
    places = sorted(own.keys() - without)
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
        with _remembered():
            if without:
                exchange.take(arguments)
                result = exchange.complete(without)
            else:
                result = exchange.run(arguments)
        outputs = [
            np.asarray(result.complete),
            np.array([result.gradients[place] is not None for place in wanted], bool),
        ]
        for place in wanted:
            outputs += _outputs(exchange, result, place, sparse=place in sparse)
        return outputs

    specs: list[tf.TensorSpec] = [tf.TensorSpec([], tf.bool), tf.TensorSpec([len(wanted)], tf.bool)]
    for place in wanted:
        info = exchange.variables[place]
        dtype = NUMPY_DTYPES[info.dtype]
        if place in sparse:
            specs += [tf.TensorSpec([None, *info.shape[1:]], dtype), tf.TensorSpec([None], tf.int64)]
        else:
            specs.append(tf.TensorSpec(info.shape, dtype))
    complete, present, *rest = _node(run, inputs, specs)
    gradients: dict[int, Gradient] = {}
    for place in wanted:
        if place in sparse:
            values, indices = rest.pop(0), rest.pop(0)
            gradients[place] = tf.IndexedSlices(values, indices, tf.constant(exchange.variables[place].shape))
        else:
            gradients[place] = rest.pop(0)
    elsewhere = {place: present[index] for index, place in enumerate(wanted) if place not in own}
    return complete, elsewhere, gradients


def _node(
    function: Callable[..., list[Array]], inputs: Sequence[tf.Tensor], outputs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    with tf.device("CPU:0"):
        tensors = tf.numpy_function(function, inputs, [spec.dtype for spec in outputs], name=EXCHANGE_NAME)
    if not outputs:  # and `tensors` is the operation
        return []
    for tensor, spec in zip(tensors, outputs, strict=True):
        tensor.set_shape(spec.shape)
    return list(tensors)


@contextmanager
def _remembered() -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        graph.remember_failure(exc)
        raise


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
