"""Gradients as tensors on one side, a fused exchange of arrays on the other: in eager mode and in graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from unidist.errors import UsageError
from unidist.gradients.buckets import ParameterInfo
from unidist_arrays.fused_exchange import ExchangeResult, FusedExchange, absent_gradient
from unidist_arrays.slices import Slices
from unidist_tensorflow.gradients import storing
from unidist_tensorflow.gradients.storing import GradientStore
from unidist_tensorflow.memory import NUMPY_DTYPES, Array, array_of, tensor_of_array
from unidist_tensorflow.operations import graph
from unidist_tensorflow.operations.errors import as_op_errors
from unidist_tensorflow.xla import check_not_for_xla

EXCHANGE_NAME = "unidist_exchange_of_gradients_which_needs_jit_compile_False"
"""Of the node in graphs; XLA, which cannot call into the host, names it in its error."""

HostFunction = Callable[..., Sequence[Array]]
"""The function behind a node of a graph: takes its inputs as arrays, and returns its results."""

Gradient = Any
"""A `tf.Tensor` or a `tf.IndexedSlices`."""


_TOKEN = np.zeros((), np.int32)
_last_tokens: WeakKeyDictionary[tf.Graph, str] = WeakKeyDictionary()
"""The name of the token of the last node that was added to a `tf.function`'s graph."""


@dataclass(frozen=True)
class ExchangeOutputs:
    """The outputs of an exchange that is a node of a graph.

    Args:
        specs: types of the arrays, and what is known of their shapes.
        arrays: gives them, of a complete exchange or of one inside of a window, where their values do not matter.
    """

    specs: Sequence[tf.TensorSpec]
    arrays: Callable[[ExchangeResult], Sequence[Array]]


def exchange_eagerly(exchange: FusedExchange, own: Mapping[int, Gradient]) -> ExchangeResult:
    """Run the exchange with this rank's gradients by place."""
    arrays: dict[int, Array | Slices] = {}
    for place, gradient in own.items():
        if isinstance(gradient, tf.IndexedSlices):
            arrays[place] = Slices(array_of(gradient.values), array_of(tf.cast(gradient.indices, tf.int64)))
        else:
            arrays[place] = array_of(gradient)
    with as_op_errors():
        return exchange.run(arrays)


def tensor_of(exchange: FusedExchange, result: ExchangeResult, place: int, *, sparse: bool) -> Gradient | None:
    """Return a gradient of an exchange, in the form wanted; None if no rank had one."""
    gradient = result.gradients[place]
    if gradient is None:
        return None
    shape = exchange.variables[place].shape
    formed = _formed(gradient, shape, sparse=sparse)
    if isinstance(formed, Slices):
        return tf.IndexedSlices(tensor_of_array(formed.values), tensor_of_array(formed.indices), tf.constant(shape))
    return tensor_of_array(formed)


def exchange_in_graph(
    exchange: FusedExchange,
    own: Mapping[int, Gradient],
    taken: ExchangeOutputs,
    keeper: list[HostFunction] | None = None,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Add the exchange to the graph that is being built.

    The node blocks until all ranks run theirs. It cannot hang: `tf.function` runs such nodes in program order, so
    all ranks reach the same one; other operations that wait for peers (`graph`) have their own threads.

    Args:
        exchange: what runs.
        own: this rank's gradients by place.
        taken: what to return of its result.
        keeper: see `host_node`.

    Returns:
        Whether the step is complete, a bool; and what is taken.
    """
    sparse = {place for place in own if isinstance(own[place], tf.IndexedSlices)}
    stored = sorted(own.keys() - sparse) if storing.is_available() and not exchange.memory_moves else []
    places = sorted(own.keys() - set(stored))
    inputs: list[tf.Tensor] = []
    for place in places:
        gradient = own[place]
        if isinstance(gradient, tf.IndexedSlices):
            inputs += [gradient.values, tf.cast(gradient.indices, tf.int64)]
        else:
            inputs.append(gradient)
    store = GradientStore(exchange, stored, sparse) if stored else None

    def run(*arrays: Any) -> list[Array]:
        left = [] if store is None else store.end()
        given = iter([np.asarray(array) for array in arrays])
        arguments: dict[int, Array | Slices] = {
            place: Slices(next(given), next(given)) if place in sparse else next(given) for place in places
        }
        result = exchange.run(arguments, left)
        return [np.asarray(result.complete), *taken.arrays(result)]

    with tf.control_dependencies([] if store is None else _store_nodes(store, own, keeper)):
        complete, *outputs = host_node(
            run, inputs, [tf.TensorSpec([], tf.bool), *taken.specs], name=EXCHANGE_NAME, keeper=keeper
        )
    return complete, outputs


def _store_nodes(
    store: GradientStore, own: Mapping[int, Gradient], keeper: list[HostFunction] | None
) -> list[tf.Operation]:
    def begin() -> list[Array]:
        store.begin()
        return [np.asarray(True)]

    begun = host_node(begin, [], [tf.TensorSpec([], tf.bool)], name=EXCHANGE_NAME, keeper=keeper)
    with tf.control_dependencies(begun), tf.device("CPU:0"):
        nodes = [store.add_node(own[place], place) for place in reversed(store.places)]
    graph.make_independent(nodes)
    return nodes


@graph.unconverted
def host_node(
    function: HostFunction,
    inputs: Sequence[tf.Tensor],
    specs: Sequence[tf.TensorSpec],
    *,
    name: str,
    keeper: list[HostFunction] | None = None,
) -> list[tf.Tensor]:
    """Add a Python function to the graph that is being built, or call it in eager mode; returns its results as tensors.

    It runs in program order, and may wait for other ranks that run theirs: in a `tf.function`, each node has a token of
    the one before as an input. TensorFlow's own control dependencies are not enough: its optimizer of graphs drops one
    where another path has the same order, and then may break that path. What the function raises is kept for
    `graph.take_failure`, as TensorFlow passes on no more than the text.

    Args:
        function: takes the inputs as arrays, in graphs as numpy gives them (scalars are no arrays).
        inputs: of the node.
        specs: types of the results, and what is known of their shapes.
        name: of the node; XLA, which cannot call into the host, names it in its error.
        keeper: belongs to what the function needs, and keeps it for the node, which ends with it; None: TensorFlow
            keeps it, and all that it refers to, until the process ends.
    """
    if tf.executing_eagerly():
        with as_op_errors():
            return [tensor_of_array(array) for array in function(*map(array_of, inputs))]

    check_not_for_xla(name)
    kept = _kept(function, keeper)

    def run(*arrays: Any) -> Sequence[Array]:
        try:
            return [_TOKEN, *kept()(*arrays[num_tokens:])]
        except Exception as exc:
            graph.remember_failure(exc)
            raise

    nodes = tf.compat.v1.get_default_graph()
    tokens = [nodes.get_tensor_by_name(_last_tokens[nodes])] if nodes in _last_tokens else []
    num_tokens = len(tokens)
    with tf.device("CPU:0"):
        types = [tf.int32, *(spec.dtype for spec in specs)]
        token, *outputs = tf.numpy_function(run, [*tokens, *inputs], types, name=name)
    if nodes.building_function and tf.compat.v1.control_flow_v2_enabled():
        _last_tokens[nodes] = token.name
    for output, spec in zip(outputs, specs, strict=True):
        output.set_shape(spec.shape)
    return outputs


def _kept(function: HostFunction, keeper: list[HostFunction] | None) -> Callable[[], HostFunction]:
    """Return a getter of a function that a list keeps alive; without a list, it is kept for ever."""
    if keeper is None:
        return lambda: function
    keeper.append(function)
    reference = weakref.ref(function)

    def found() -> HostFunction:
        found = reference()
        if found is None:
            raise UsageError(
                "a function of TensorFlow runs the update of an optimizer that is no more: keep the optimizer as long "
                "as what was traced with it"
            )
        return found

    return found


class AddedOperations:
    """The operations that are added to the graph being built, from now on.

    TensorFlow keeps nodes of the host in program order among themselves, but not against those inside of a `tf.cond`:
    operations that must come after those need a dependency.
    """

    def __init__(self) -> None:
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._first = 0 if self._graph is None else len(self._graph.get_operations())

    def stateful(self) -> list[tf.Operation]:
        """Return the operations with effects, for `tf.control_dependencies`; none in eager mode."""
        if self._graph is None:
            return []
        return [operation for operation in self._graph.get_operations()[self._first :] if operation.op_def.is_stateful]


def whole_gradients(variables: Sequence[ParameterInfo], wanted: Sequence[int], sparse: set[int]) -> ExchangeOutputs:
    """Return the outputs for whole gradients: flags `(wanted,)` whether any rank had them, bool, then the gradients.

    A gradient that no rank had is zeros.

    Args:
        variables: of the exchange.
        wanted: places of the gradients.
        sparse: those of them whose gradient is taken as slices, in values and indices.
    """
    specs = [tf.TensorSpec([len(wanted)], tf.bool)]
    for place in wanted:
        info = variables[place]
        dtype = tf.as_dtype(NUMPY_DTYPES[info.dtype])
        if place in sparse:
            specs += [tf.TensorSpec([None, *info.shape[1:]], dtype), tf.TensorSpec([None], tf.int64)]
        else:
            specs.append(tf.TensorSpec(info.shape, dtype))

    def arrays(result: ExchangeResult) -> list[Array]:
        outputs = [np.array([result.gradients[place] is not None for place in wanted], bool)]
        for place in wanted:
            info, is_sparse = variables[place], place in sparse
            gradient = result.gradients[place]
            if gradient is None:
                gradient = absent_gradient(info, sparse=is_sparse)
            formed = _formed(gradient, info.shape, sparse=is_sparse)
            outputs += [formed.values, formed.indices] if isinstance(formed, Slices) else [formed]
        return outputs

    return ExchangeOutputs(specs, arrays)


def gradients_of(
    outputs: Sequence[tf.Tensor], variables: Sequence[ParameterInfo], wanted: Sequence[int], sparse: set[int]
) -> list[Gradient]:
    """Return the gradients among the outputs of `whole_gradients`."""
    rest = list(outputs[1:])
    gradients: list[Gradient] = []
    for place in wanted:
        if place in sparse:
            values, indices = rest.pop(0), rest.pop(0)
            gradients.append(tf.IndexedSlices(values, indices, tf.constant(variables[place].shape)))
        else:
            gradients.append(rest.pop(0))
    return gradients


def _formed(gradient: Array | Slices, shape: Sequence[int], *, sparse: bool) -> Array | Slices:
    """Return a gradient as slices or dense, as asked."""
    if sparse:
        return Slices.of(gradient)
    return gradient.dense(shape) if isinstance(gradient, Slices) else gradient
