"""The program of a subclassed Keras model: its `call` is traced with symbolic tensors.

Every layer and every `keras.ops` function that it calls leaves a node, as when a Functional model is built. Whatever a
node cannot represent is refused: TensorFlow functions, and reads of variables outside of a layer's call, whose
gradients would be lost. A call may do different things in training and in inference, so it is traced once for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import keras

from unidist.errors import UsageError
from unidist_pipeline._keras.tracing.program import GraphRecorder, Program, Ref, graph_of, graph_program


def programs_of(model: Any) -> tuple[Program, Program]:
    """Return a built model's program in training and in inference; the same one if it does not depend on that.

    Raises:
        UsageError: its call cannot be traced; says what to do.
    """
    graph = graph_of(model)
    if graph is not None:
        program = graph_program(graph)
        return program, program
    return _followed(model, training=True), _followed(model, training=False)


def _followed(model: Any, *, training: bool) -> Program:
    inputs = _symbolic_inputs(model)
    options = {"training": training} if model._call_has_training_arg else {}
    found: list[Any] = []
    errors: list[Exception] = []

    def follow() -> None:
        try:
            found.append(model.call(inputs, **options))
        except (
            Exception
        ) as exc:  # whatever the model's own code raises when it is given a symbol; Keras would add to it
            errors.append(exc)

    with _Watch(model):
        _Outer(follow)(None, training=training)
    for error in errors:
        if isinstance(error, UsageError):
            raise error
        first_line = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"the model {model.name!r} ({type(model).__name__}) is subclassed, and its call cannot be followed in "
            f"order to cut it into stages: {type(error).__name__}: {first_line} A call that can be followed uses "
            "layers and keras.ops on its tensors, no tf functions and no sizes of the batch; or give a Functional or "
            "Sequential model"
        ) from error
    (outputs,) = found
    function = keras.Function(inputs, outputs)
    recorder = GraphRecorder(followed_in=training)
    numbers = [recorder.value_of(tensor) for tensor in function.inputs]
    results = recorder.record(function, numbers)

    def standardize(called_with: Any) -> list[Any]:
        keras.tree.assert_same_structure(called_with, inputs)
        return [
            model.dtype_policy.convert_input(leaf, model.autocast, model.input_dtype)
            for leaf in keras.tree.flatten(called_with)
        ]

    structure = keras.tree.pack_sequence_as(outputs, [Ref(number) for number in results])
    return Program(tuple(numbers), tuple(recorder.steps), structure, tuple(recorder.values), standardize)


def _symbolic_inputs(model: Any) -> Any:
    """Return symbols for the inputs with which a subclassed model was built."""
    shapes = getattr(model, "_build_shapes_dict", None)
    if not shapes or len(shapes) != 1:
        raise UsageError(
            f"the model {model.name!r} ({type(model).__name__}) is subclassed, and to cut it into stages its input's "
            "shape must be known: call model.build(input_shape) before it is distributed, or give a Functional model. "
            f"Found: {shapes}"
        )
    (shape,) = shapes.values()
    return keras.tree.map_shape_structure(lambda each: keras.KerasTensor((None, *each[1:]), model.input_dtype), shape)


class _Outer(keras.layers.Layer):  # type: ignore[misc]  # keras has no types
    """Calls a function within a layer's call, so that layers called by it know whether this is training."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__()
        self._allow_non_tensor_positional_args = True
        self._function = function

    def call(self, nothing: None, training: bool = False) -> None:
        """Call the function."""
        self._function()


class _Watch(keras.StatelessScope):  # type: ignore[misc]  # keras has no types
    """Refuses reads of a model's variable by the call itself, outside of its layers."""

    def __init__(self, model: Any) -> None:
        super().__init__(initialize_variables=False)
        self._paths = {id(variable): str(variable.path) for variable in model.variables}

    def get_current_value(self, variable: Any) -> Any:
        if id(variable) in self._paths:
            self._refuse(self._paths[id(variable)])
        return super().get_current_value(variable)

    def _refuse(self, path: str) -> NoReturn:
        raise UsageError(
            f"the model's call reads the variable {path!r} by itself, so to cut it into stages it cannot be followed. "
            "Use the variable within a layer, or as it is in a keras.ops function that also takes a tensor of the call "
            "(ops.matmul(x, variable))"
        )
