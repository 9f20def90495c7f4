"""Users of the outputs of a Keras model's layers: its graph, with composite layers opened by calls on symbols.

A Functional or Sequential model has a graph. A layer or a model of the script has none: its `call` is given symbolic
tensors, and what it calls leaves nodes. If that fails (it uses TensorFlow functions), the layers inside are not known
to feed anything, and stay whole unless the user gives them a role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras

_ELEMENT_WISE_LAYERS = (
    keras.layers.Activation,
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.ELU,
    keras.layers.Dropout,
    keras.layers.Identity,
    keras.layers.Add,
    keras.layers.Multiply,
    keras.layers.Subtract,
)
_ELEMENT_WISE_OPERATIONS = frozenset(
    [
        "Abs",
        "Add",
        "Cast",
        "Celu",
        "ConvertToTensor",
        "Divide",
        "Elu",
        "Exp",
        "Gelu",
        "HardSigmoid",
        "HardSilu",
        "HardTanh",
        "Identity",
        "LeakyRelu",
        "LogSigmoid",
        "Maximum",
        "Minimum",
        "Mish",
        "Multiply",
        "Negative",
        "Relu",
        "Relu6",
        "Selu",
        "Sigmoid",
        "Silu",
        "Softplus",
        "Softsign",
        "Sqrt",
        "Square",
        "Subtract",
        "Tanh",
        "TrueDivide",
    ]
)
"""Classes of Keras' own operations that treat each element by itself."""

ELEMENT_WISE_ACTIVATIONS = frozenset(
    [
        "linear",
        "relu",
        "relu6",
        "gelu",
        "tanh",
        "sigmoid",
        "silu",
        "swish",
        "elu",
        "selu",
        "celu",
        "softplus",
        "softsign",
        "exponential",
        "leaky_relu",
        "mish",
        "hard_sigmoid",
        "hard_silu",
        "hard_swish",
        "hard_tanh",
        "log_sigmoid",
        "squareplus",
    ]
)

OUTSIDE = ""
"""Stands for whatever is no layer that may be cut."""


def is_element_wise(activation: Any) -> bool:
    """Return whether an activation function treats each element by itself; one that is not known does not."""
    return activation is None or getattr(activation, "__name__", "") in ELEMENT_WISE_ACTIVATIONS


class Flow:
    """The data flow of one model.

    Args:
        model: built.
        is_leaf: says that a layer is not opened: it may be cut itself.
    """

    def __init__(self, model: Any, is_leaf: Callable[[Any], bool]) -> None:
        self._is_leaf = is_leaf
        self._makers: dict[int, Any] = {}  # node by the identity of its outputs
        self._users: dict[int, list[Any]] = {}  # nodes by the identity of their inputs
        self._same: dict[int, int] = {}  # one tensor under two identities: inside and outside of a composite layer
        self._kept: list[Any] = []  # tensors whose identities are in use
        self._outputs: set[int] = set()
        self._opened: set[int] = set()  # graphs, by their identity
        self.failures: dict[int, str] = {}
        """Why a composite layer could not be opened, by its identity."""
        self._open_model(model)

    def origins(self, layer: Any) -> set[Any]:
        """Return the leaves whose outputs a leaf takes after element-wise operations alone, `OUTSIDE` for all else."""
        found: set[Any] = set()
        for node in self._nodes_of(layer):
            for tensor in node.input_tensors:
                found |= self._origins(tensor, set())
        return found or {OUTSIDE}

    def destinations(self, layer: Any) -> set[Any]:
        """Return the leaves that take a leaf's outputs after element-wise operations alone, `OUTSIDE` for all else."""
        found: set[Any] = set()
        for node in self._nodes_of(layer):
            for tensor in node.output_tensors:
                found |= self._destinations(tensor, set())
        return found or {OUTSIDE}

    def is_output(self, layer: Any) -> bool:
        """Return whether the model returns a leaf's output unchanged, and nothing else uses it."""
        keys = {self._key(tensor) for node in self._nodes_of(layer) for tensor in node.output_tensors}
        return bool(keys) and keys <= self._outputs and not any(self._users.get(key) for key in keys)

    def follows(self, first: Any, second: Any) -> bool:
        """Return whether one leaf takes another one's output, unchanged, and nothing else does."""
        nodes = self._nodes_of(first)
        if len(nodes) != 1:
            return False
        keys = {self._key(tensor) for tensor in nodes[0].output_tensors}
        users = [node.operation for key in keys for node in self._users.get(key, ())]
        return len(users) == 1 and users[0] is second and not keys & self._outputs

    def shape_into(self, layer: Any) -> tuple[int | None, ...] | None:
        """Return the shape of the one tensor that a leaf is called with; None if there are more, or several calls."""
        nodes = self._nodes_of(layer)
        if len(nodes) != 1 or len(nodes[0].input_tensors) != 1:
            return None
        return tuple(nodes[0].input_tensors[0].shape)

    def between(self, first: Any) -> set[Any]:
        """Return the element-wise layers that the outputs of a leaf go through."""
        passed: set[Any] = set()
        for node in self._nodes_of(first):
            for tensor in node.output_tensors:
                self._destinations(tensor, passed)
        return {operation for operation in passed if isinstance(operation, keras.layers.Layer)}

    def _nodes_of(self, layer: Any) -> list[Any]:
        nodes = {id(node): node for node in self._makers.values() if node.operation is layer}
        return list(nodes.values())

    def _origins(self, tensor: Any, seen: set[int]) -> set[Any]:
        key = self._key(tensor)
        if key in seen:
            return set()
        seen.add(key)
        node = self._makers.get(key)
        if node is None:
            return {OUTSIDE}
        if self._is_leaf(node.operation):
            return {node.operation}
        if not _treats_elements(node):
            return {OUTSIDE}
        found: set[Any] = set()
        for each in node.input_tensors:
            found |= self._origins(each, seen)
        return found

    def _destinations(self, tensor: Any, passed: set[Any]) -> set[Any]:
        key = self._key(tensor)
        found: set[Any] = {OUTSIDE} if key in self._outputs else set()
        for node in self._users.get(key, ()):
            if self._is_leaf(node.operation):
                found.add(node.operation)
            elif _treats_elements(node):
                passed.add(node.operation)
                for each in node.output_tensors:
                    found |= self._destinations(each, passed)
            else:
                found.add(OUTSIDE)
        return found

    def _key(self, tensor: Any) -> int:
        key = id(tensor)
        while key in self._same:
            key = self._same[key]
        return key

    # Opening

    def _open_model(self, model: Any) -> None:
        graph = _graph_of(model)
        if graph is not None:
            self._trace(graph.outputs, graph.inputs)
            self._outputs = {self._key(tensor) for tensor in graph.outputs}
            return
        shapes = getattr(model, "_build_shapes_dict", None) or {}
        if len(shapes) != 1:
            self.failures[id(model)] = "the shapes of its inputs are not known; call model.build(input_shape)"
            return
        [shape] = shapes.values()
        inputs = keras.tree.map_shape_structure(
            lambda each: keras.KerasTensor((None, *each[1:]), model.input_dtype), shape
        )
        outputs = self._called(model, (inputs,), {})
        if outputs is not None:
            self._trace(outputs, keras.tree.flatten(inputs))
            self._outputs = {self._key(tensor) for tensor in outputs}

    def _trace(self, outputs: Iterable[Any], inputs: Iterable[Any]) -> None:
        """Record the nodes between `inputs` and `outputs`, including those inside of composite layers."""
        stop = {id(tensor) for tensor in inputs}
        waiting, seen = list(outputs), set(stop)
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            history = getattr(tensor, "_keras_history", None)
            if history is None or history.operation is None:
                continue
            node = history.operation._inbound_nodes[history.node_index]
            waiting += node.input_tensors
            self._note(node)

    def _note(self, node: Any) -> None:
        keys = [id(tensor) for tensor in node.output_tensors]
        if all(key in self._makers or key in self._same for key in keys):
            return
        self._kept += [*node.input_tensors, *node.output_tensors]
        operation = node.operation
        is_layer = isinstance(operation, keras.layers.Layer)
        if is_layer and not self._is_leaf(operation) and is_composite(operation) and self._open(node):
            return
        for key in keys:
            self._makers[key] = node
        for tensor in node.input_tensors:
            users = self._users.setdefault(self._key(tensor), [])
            if node not in users:
                users.append(node)

    def _open(self, node: Any) -> bool:
        """Record the inside of a composite layer in place of it; says whether that worked."""
        graph = _graph_of(node.operation)
        if graph is not None and id(graph) not in self._opened:
            self._opened.add(id(graph))
            for inner, outer in zip(graph.inputs, node.input_tensors, strict=True):
                self._alias(inner, outer)
            outputs, inputs = graph.outputs, graph.inputs
        else:  # also a graph that is used once more: its own symbols stand for the first use
            found = self._called(node.operation, node.arguments.args, node.arguments.kwargs)
            if found is None:
                return False
            outputs, inputs = found, node.input_tensors
        self._trace(outputs, inputs)
        for inner, outer in zip(outputs, node.output_tensors, strict=True):
            self._alias(outer, inner)
        return True

    def _alias(self, tensor: Any, other: Any) -> None:
        """Make two tensors the same."""
        self._kept += [tensor, other]
        if self._key(tensor) == self._key(other):
            return
        users = self._users.pop(self._key(tensor), [])
        self._same[self._key(tensor)] = self._key(other)
        self._users.setdefault(self._key(other), []).extend(users)

    def _called(self, layer: Any, args: Any, kwargs: Any) -> list[Any] | None:
        try:
            with keras.name_scope(layer.name):
                outputs: list[Any] = keras.tree.flatten(layer.call(*args, **kwargs))
            if not all(isinstance(each, keras.KerasTensor) for each in outputs):
                raise TypeError("it returns something else than tensors")
        except Exception as exc:  # whatever the script's own code raises when it is given a symbol
            self.failures[id(layer)] = (
                f"the call of {type(layer).__name__} cannot be followed ({type(exc).__name__}: "
                f"{str(exc).strip().partition(chr(10))[0][:120]}); use keras.ops in it, or give its layers roles"
            )
            return None
        return outputs


def _graph_of(layer: Any) -> Any:
    """Return the graph of a Functional or Sequential model; None for others."""
    if isinstance(layer, keras.Sequential):
        return layer._functional
    return layer if isinstance(layer, keras.Model) and hasattr(layer, "_nodes_by_depth") else None


def is_composite(layer: Any) -> bool:
    """Return whether a layer is made of layers."""
    return any(True for _ in layer._flatten_layers(include_self=False))


def _treats_elements(node: Any) -> bool:
    operation = node.operation
    if isinstance(operation, keras.layers.Activation):
        return is_element_wise(operation.activation)
    if isinstance(operation, keras.layers.Layer):
        return isinstance(operation, _ELEMENT_WISE_LAYERS)
    own = type(operation).__module__.startswith("keras.")
    return own and type(operation).__name__ in _ELEMENT_WISE_OPERATIONS
