"""A Keras model as a list of operations in the order in which they can run, which can be cut between any two.

A Sequential or Functional model has that list already, as a graph of nodes; models within it are taken apart, so that
it can be cut inside of them too. A subclassed model has none: its `call` is traced with symbolic tensors, see `tracer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras


@dataclass(frozen=True)
class Ref:
    """Stands for a value of the program in arguments and results.

    Args:
        number: of the value.
    """

    number: int


@dataclass(frozen=True)
class Value:
    """The result of an operation, or an input.

    Args:
        shape: with None for unknown sizes, above all that of the batch.
        dtype: its name.
        masked: it carries a Keras mask.
    """

    shape: tuple[int | None, ...]
    dtype: str
    masked: bool


@dataclass(frozen=True)
class ProgramStep:
    """One operation of the program.

    Args:
        operation: a layer or another Keras operation.
        args: positional arguments, values as `Ref`.
        kwargs: the same, by name.
        results: numbers of the values that it makes.
        imposes_training: whether this is training overrides what the call itself says, as in Functional models.
    """

    operation: Any
    args: Any
    kwargs: Any
    results: tuple[int, ...]
    imposes_training: bool

    @property
    def used(self) -> tuple[int, ...]:
        """The numbers of the values that it takes."""
        return tuple(leaf.number for leaf in self._leaves() if isinstance(leaf, Ref))

    @property
    def layer(self) -> Any:
        """The layer that it calls; None for another operation."""
        return self.operation if isinstance(self.operation, keras.layers.Layer) else None

    @property
    def variables(self) -> list[Any]:
        """The Keras variables that it uses: the layer's, and those among the arguments."""
        own = list(self.operation.variables) if self.layer is not None else []
        return [*own, *(leaf for leaf in self._leaves() if isinstance(leaf, keras.Variable))]

    def run(self, values: Mapping[int, Any], training: bool) -> list[Any]:
        """Call the operation; returns what it makes, in the order of `results`."""

        def filled(leaf: Any) -> Any:
            return values[leaf.number] if isinstance(leaf, Ref) else leaf

        args, kwargs = keras.tree.map_structure(filled, (self.args, self.kwargs))
        if self.imposes_training and getattr(self.operation, "_call_has_training_arg", False):
            kwargs["training"] = training
        return list(keras.tree.flatten(self.operation(*args, **kwargs)))

    def _leaves(self) -> list[Any]:
        return list(keras.tree.flatten((self.args, self.kwargs)))


@dataclass(frozen=True)
class Program:
    """A model's operations.

    Args:
        inputs: numbers of the model's inputs, in the order of `keras.tree.flatten`.
        steps: in an order in which they can run.
        outputs: the structure that the model returns, of `Ref`.
        values: every value, by number.
        standardize: turns the arguments of the model's call into its flat inputs.
    """

    inputs: tuple[int, ...]
    steps: tuple[ProgramStep, ...]
    outputs: Any
    values: tuple[Value, ...]
    standardize: Callable[[Any], list[Any]]

    @property
    def returned(self) -> tuple[int, ...]:
        """The numbers of what the model returns, each once."""
        return tuple(dict.fromkeys(leaf.number for leaf in keras.tree.flatten(self.outputs)))


def graph_of(model: Any) -> Any:
    """Return the graph of a Sequential or Functional model whose call runs nothing else; otherwise None."""
    kind = type(model)
    if isinstance(model, keras.Sequential):
        graph = getattr(model, "_functional", None)
        return graph if kind.call is keras.Sequential.call else None
    return model if hasattr(model, "_nodes_by_depth") and kind.call is _functional_call() else None


def graph_program(graph: Any) -> Program:
    """Return the program of a graph, a Functional model."""
    recorder = GraphRecorder()
    inputs = [recorder.value_of(tensor) for tensor in graph.inputs]
    outputs = recorder.record(graph, inputs)

    def standardize(called_with: Any) -> list[Any]:
        return list(graph._standardize_inputs(called_with))

    structure = keras.tree.pack_sequence_as(graph._outputs_struct, [Ref(number) for number in outputs])
    if isinstance(structure, list | tuple) and len(structure) == 1:  # as Functional models return it
        structure = structure[0]
    return Program(tuple(inputs), tuple(recorder.steps), structure, tuple(recorder.values), standardize)


class GraphRecorder:
    """Numbers the values of graphs, and lists their operations.

    Args:
        followed_in: whether the outermost graph was traced in training or in inference, and its calls say so; None: it
            is a Functional model's, which says so whenever it runs.

    Attributes:
        steps: so far.
        values: so far, by number.
    """

    def __init__(self, followed_in: bool | None = None) -> None:
        self.steps: list[ProgramStep] = []
        self.values: list[Value] = []
        self._followed_in = followed_in

    def value_of(self, tensor: Any) -> int:
        """Return the number of a new value like a symbolic tensor."""
        masked = getattr(tensor, "_keras_mask", None) is not None
        self.values.append(Value(tuple(tensor.shape), str(tensor.dtype), masked))
        return len(self.values) - 1

    def record(self, graph: Any, inputs: Iterable[int], *, is_nested: bool = False) -> list[int]:
        """Add the operations of a graph; returns the numbers of its flat outputs.

        Args:
            graph: a Functional model or a `keras.Function`.
            inputs: the numbers of its flat inputs.
            is_nested: it is a model within the program's.
        """
        numbers = {id(tensor): number for tensor, number in zip(graph.inputs, inputs, strict=True)}

        def referred(leaf: Any) -> Any:
            return Ref(numbers[id(leaf)]) if isinstance(leaf, keras.KerasTensor) else leaf

        for depth in sorted(graph._nodes_by_depth, reverse=True):
            for node in graph._nodes_by_depth[depth]:
                tensors = node.input_tensors
                is_known = all(id(tensor) in numbers for tensor in node.outputs)
                if node.is_input or is_known or any(id(tensor) not in numbers for tensor in tensors):
                    continue
                args, kwargs = keras.tree.map_structure(referred, (node.arguments.args, node.arguments.kwargs))
                inner = self._graph_within(node.operation, args, kwargs)
                if inner is not None:
                    taken = [leaf.number for leaf in keras.tree.flatten(args)]
                    results = self.record(inner, taken, is_nested=True)
                else:
                    results = [self.value_of(tensor) for tensor in node.outputs]
                    imposes = self._followed_in is None or is_nested
                    self.steps.append(ProgramStep(node.operation, args, kwargs, tuple(results), imposes))
                for tensor, number in zip(node.outputs, results, strict=True):
                    numbers[id(tensor)] = number
        return [numbers[id(tensor)] for tensor in graph.outputs]

    def _graph_within(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the graph of a model that is called within another, if the call does nothing but run it.

        That is: with tensors of exactly the types and ranks that it wants, and nothing else.
        """
        graph = graph_of(operation) if isinstance(operation, keras.Model) else None
        if graph is None or len(args) != 1 or getattr(operation, "activity_regularizer", None) is not None:
            return None
        said = {name: value for name, value in kwargs.items() if value is not None}
        if said and (set(said) != {"training"} or self._followed_in not in (None, said["training"])):
            return None
        leaves = keras.tree.flatten(args[0])
        wanted = graph.inputs
        if len(leaves) != len(wanted) or not all(isinstance(leaf, Ref) for leaf in leaves):
            return None
        if len(wanted) > 1 and not _same_structure(args[0], graph._inputs_struct):
            return None
        for leaf, tensor in zip(leaves, wanted, strict=True):
            value = self.values[leaf.number]
            if value.dtype != str(tensor.dtype) or len(value.shape) != len(tensor.shape):
                return None
        return graph


def _same_structure(first: Any, second: Any) -> bool:
    try:
        keras.tree.assert_same_structure(first, second)
    except (TypeError, ValueError):
        return False
    return True


def _functional_call() -> Any:
    """Return the `call` of Functional models, whose class Keras does not name in public."""
    return type(keras.Model(tensor := keras.Input((1,)), tensor)).call
