"""Classifies layers by their use of tokens: one by one, attending to all, made of such layers, or needing all.

A layer that is made of layers is called with symbols of two lengths. If all that it does is known, with no other
tensors that depend on the length (positions made in its call), it gets some tokens; else all.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import keras

ATTENTIONS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)

_BY_ELEMENT = (
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.ELU,
    keras.layers.Dropout,
    keras.layers.Identity,
    keras.layers.Add,
    keras.layers.Multiply,
    keras.layers.Subtract,
    keras.layers.Average,
    keras.layers.Maximum,
    keras.layers.Minimum,
)
_ACTIVATIONS = frozenset(
    [
        "linear", "relu", "relu6", "gelu", "tanh", "sigmoid", "silu", "swish", "elu", "selu", "celu", "softplus",
        "softsign", "exponential", "leaky_relu", "mish", "hard_sigmoid", "hard_silu", "hard_swish", "hard_tanh",
        "log_sigmoid", "squareplus", "softmax", "log_softmax",
    ]
)  # fmt: skip
_OPERATIONS = frozenset(
    [
        "Abs", "Add", "Cast", "Celu", "Divide", "Elu", "Exp", "Gelu", "HardSigmoid", "HardSilu", "HardTanh", "Identity",
        "LeakyRelu", "LogSigmoid", "Maximum", "Minimum", "Mish", "Multiply", "Negative", "Relu", "Relu6", "Selu",
        "Sigmoid", "Silu", "Softplus", "Softsign", "Sqrt", "Rsqrt", "Square", "Subtract", "Tanh", "TrueDivide", "Sin",
        "Cos", "Power",
    ]
)  # fmt: skip


class InputKind(Enum):
    """The inputs that a layer receives."""

    TOKENS = "some tokens, each by itself"
    ATTENTION = "some queries, all keys"
    COMPOSITE = "some tokens, in all of its layers"
    ALL = "all tokens"


def kind_of(operation: Any, node: Any) -> InputKind:
    """Return the kind of an operation of a graph.

    Args:
        operation: a layer, or an operation of Keras.
        node: of the graph, with what it is called with.
    """
    if isinstance(operation, ATTENTIONS):
        return InputKind.ATTENTION if _attends_by_tokens(operation, node) else InputKind.ALL
    if _by_token(operation, node):
        return InputKind.TOKENS
    if isinstance(operation, keras.layers.Layer) and any(True for _ in operation._flatten_layers(include_self=False)):
        return InputKind.COMPOSITE if _is_followed(operation, node) else InputKind.ALL
    return InputKind.ALL


def _attends_by_tokens(layer: Any, node: Any) -> bool:
    scores = node.arguments.kwargs.get("return_attention_scores", False)
    axes = getattr(layer, "_attention_axes", (1,))
    return not scores and tuple(axes or (1,)) == (1,) and all(len(each.shape) == 3 for each in _sequences(node))


def _sequences(node: Any) -> list[Any]:
    """Return query, value and key of an attention."""
    args, kwargs = node.arguments.args, node.arguments.kwargs
    return [*args[:3], *(kwargs[name] for name in ("query", "value", "key") if kwargs.get(name) is not None)]


def _by_token(operation: Any, node: Any) -> bool:
    if isinstance(operation, keras.layers.Layer) and getattr(operation, "activity_regularizer", None) is not None:
        return False
    if isinstance(operation, keras.layers.Activation):
        return getattr(operation.activation, "__name__", "") in _ACTIVATIONS
    if isinstance(operation, keras.layers.Dropout):
        return operation.noise_shape is None
    if isinstance(operation, (keras.layers.Embedding, *_BY_ELEMENT)):
        return True
    if isinstance(operation, keras.layers.Dense):
        return type(operation) is keras.layers.Dense and getattr(operation.activation, "__name__", "") in _ACTIVATIONS
    if isinstance(operation, keras.layers.EinsumDense):
        inputs, _, rest = operation.equation.partition(",")
        kernel, _, outputs = rest.partition("->")
        return len(inputs) > 2 and inputs[:2] == outputs[:2] and not set(inputs[:2]) & set(kernel)
    if isinstance(operation, keras.layers.LayerNormalization | keras.layers.RMSNormalization):
        axes = operation.axis if isinstance(operation.axis, list | tuple) else [operation.axis]
        rank = len(node.input_tensors[0].shape)
        return all(axis % rank == rank - 1 for axis in axes) and rank > 2
    if isinstance(operation, keras.layers.Softmax):
        return bool(operation.axis == -1)
    if isinstance(operation, keras.layers.Concatenate):
        return bool(operation.axis == -1)
    own = type(operation).__module__.startswith("keras.")
    return own and type(operation).__name__ in _OPERATIONS


def _is_followed(layer: Any, node: Any) -> bool:
    """Return whether all that a layer made of layers does is known, and its call depends on no length."""
    if isinstance(layer, keras.Sequential):
        return layer._functional is not None and _are_followed(layer._functional)
    if isinstance(layer, keras.Model):
        return False  # it checks the length of its inputs
    if any(len(tensor.shape) < 2 or tensor.shape[1] is None for tensor in node.input_tensors):
        return False
    for each in layer._flatten_layers(include_self=False):
        if isinstance(each, keras.Sequential) and each._functional is not None:
            _allow_lengths(each._functional)
    lengths = {tensor.shape[1] for tensor in node.input_tensors}
    if len(lengths) != 1:
        return False
    [length] = lengths
    first, second = (_signature(layer, node, length, other) for other in (length, length + 3))
    return first is not None and first == second


class AnyLength:
    """Added to the class of a Functional model in a layer: its inputs may have any number of tokens."""

    @property
    def input_spec(self) -> Any:
        """The model's own, without lengths."""
        spec: Any = super().input_spec  # type: ignore[misc]  # of a Functional model
        for each in keras.tree.flatten(spec):
            if getattr(each, "shape", None) is not None and len(each.shape) > 2:
                each.shape = (each.shape[0], None, *each.shape[2:])
        return spec


def _allow_lengths(graph: Any) -> None:
    plain = type(graph)
    if not issubclass(plain, AnyLength):
        kind: Any = type(plain.__name__, (AnyLength, plain), {"__doc__": plain.__doc__})
        kind.__module__ = plain.__module__
        graph.__class__ = kind


def _are_followed(graph: Any) -> bool:
    """Return whether all layers of a graph get some tokens, and use no tables besides."""
    nodes = [node for nodes in graph._nodes_by_depth.values() for node in nodes if not node.is_input]
    return all(
        kind_of(node.operation, node) is not InputKind.ALL
        and all(
            isinstance(each, keras.KerasTensor) or len(getattr(each, "shape", ())) < 2
            for each in keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
        )
        for node in nodes
    )


def _signature(layer: Any, node: Any, length: int, other: int) -> list[str] | None:
    """Return what a layer does with inputs of another length, as text; None if something in it needs all tokens."""

    def symbol(value: Any) -> Any:
        if not isinstance(value, keras.KerasTensor):
            return value
        shape = [other if dim == length and at == 1 else dim for at, dim in enumerate(value.shape)]
        return keras.KerasTensor(shape, value.dtype)

    args, kwargs = keras.tree.map_structure(symbol, (node.arguments.args, node.arguments.kwargs))
    inputs = [each for each in keras.tree.flatten((args, kwargs)) if isinstance(each, keras.KerasTensor)]
    try:
        outputs = keras.tree.flatten(layer.call(*args, **kwargs))
    except Exception:  # whatever a layer raises when it is given symbols
        return None
    found: list[str] = []
    seen = {id(tensor) for tensor in inputs}
    waiting = list(outputs)
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        history = getattr(tensor, "_keras_history", None)
        if history is None or history.operation is None:
            return None  # made of nothing that was given
        inner = history.operation._inbound_nodes[history.node_index]
        if kind_of(history.operation, inner) is InputKind.ALL:
            return None
        for each in keras.tree.flatten((inner.arguments.args, inner.arguments.kwargs)):
            if isinstance(each, keras.KerasTensor):
                continue
            shape = getattr(each, "shape", ())
            if len(shape) > 1:
                return None  # a table of positions, or a mask, of the length that the call has seen
            found.append(repr(each) if not len(shape) else f"{type(each).__name__}{tuple(shape)}")
        if len(tensor.shape) < 2 or tensor.shape[1] != other:
            return None
        found.append(f"{type(history.operation).__name__} {[dim for at, dim in enumerate(tensor.shape) if at != 1]}")
        waiting += inner.input_tensors
    return found
