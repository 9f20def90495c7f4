"""The computation of one stage of a Keras model, as a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from unidist.errors import UsageError
from unidist_pipeline._keras.tracing.program import Program
from unidist_pipeline._keras.tracing.split import StageProgram


class StageModule(keras.layers.Layer):  # type: ignore[misc]  # keras has no types
    """Calls the layers of one stage.

    Args:
        number: of the stage.
        segments: of the programs in training and in inference.
        programs: the two.
        penalised: variables whose regularization is added here, by their regularizers: variables of several stages have
            no regularizer any more, so that it is added once.
        policy: of the whole model.
    """

    def __init__(
        self,
        number: int,
        segments: tuple[StageProgram, StageProgram],
        programs: tuple[Program, Program],
        penalised: Sequence[tuple[Any, Any]],
        policy: Any,
    ) -> None:
        super().__init__(name=f"stage_{number}", dtype=policy)
        self._convert_input_args = False  # values that pass between stages have the types that layers gave them
        self._allow_non_tensor_positional_args = True
        layers = {id(layer): layer for segment in segments for layer in segment.layers}
        covered = {id(variable) for layer in layers.values() for variable in layer.variables}
        variables = {id(each): each for segment in segments for each in segment.variables}
        self._stage_layers = list(layers.values())
        self._loose_variables = [each for key, each in variables.items() if key not in covered]
        self._run_by = _Segments(segments, programs, penalised)

    def add_variables(self, variables: Sequence[Any]) -> None:
        """Add variables of the model that no stage uses, so that they are saved; nothing can be added later."""
        known = {id(each) for each in self.variables}
        self._unused_variables = [each for each in variables if id(each) not in known]
        self.built = True

    def call(self, taken: Sequence[Any], inputs: Sequence[Any], training: bool = False) -> list[Any]:
        """Return the values that the stage passes on.

        Args:
            taken: those that the stage before passes on.
            inputs: of the whole model, flat.
            training: as for any layer.
        """
        values, losses = self._run_by.run(taken, inputs, training)
        for loss in losses:
            self.add_loss(loss)
        return values

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a stage is called with tensors only."""
        raise UsageError("a stage of a pipeline is run by its schedule; it has no symbolic form")


class _Segments:
    """The segments of a stage; not part of the layer, which would wrap its lists."""

    def __init__(
        self,
        segments: tuple[StageProgram, StageProgram],
        programs: tuple[Program, Program],
        penalised: Sequence[tuple[Any, Any]],
    ) -> None:
        self._segments = segments
        self._programs = programs
        self._penalised = penalised

    def run(self, taken: Sequence[Any], inputs: Sequence[Any], training: bool) -> tuple[list[Any], list[Any]]:
        which = 0 if training else 1
        segment, program = self._segments[which], self._programs[which]
        values = dict(zip(program.inputs, inputs, strict=True)) | dict(zip(segment.takes, taken, strict=True))
        for step in segment.steps:
            values.update(zip(step.results, step.run(values, training), strict=True))
        losses = [regularizer(variable) for variable, regularizer in self._penalised if variable.trainable]
        return [tf.convert_to_tensor(values[number]) for number in segment.passes], losses


def losses_of(module: StageModule) -> list[Any]:
    """Return the scalars that a call of a stage has added to the loss, regularization among them."""
    return [tf.reduce_sum(tf.convert_to_tensor(loss)) for loss in module.losses]
