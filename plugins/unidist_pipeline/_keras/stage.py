"""One stage of a Keras model, micro-batch by micro-batch: forward and backward, see `execution.executor.Stage`.

The forward is a compiled function, called under a tape; its backward is compiled too. It computes the gradients of
inputs and weights at once, even if only some are asked for: `backward_input` does all of the work, and
`backward_weight` adds up the results. So schedules that delay weight gradients are correct, but gain nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from unidist_pipeline._keras.module import StageModule, losses_of
from unidist_pipeline.execution.executor import Stage
from unidist_pipeline.execution.messages import Form, Message, TensorForm
from unidist_tensorflow.memory import dtype_of

Loss = Callable[[Any, Any, Any], Any]
"""Takes targets, outputs and weights of samples or None; returns a scalar, the mean over the samples."""


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Args:
        inputs: of the model, flat.
        targets: of the loss; None if there is none.
        sample_weight: weights of the samples, or None.
        fraction: of the batch's samples that are in it: the weight of its mean loss.
    """

    inputs: Sequence[Any]
    targets: Any
    sample_weight: Any
    fraction: float


@dataclass(frozen=True)
class BatchPass:
    """One pass over a batch.

    Args:
        microbatches: of the batch.
        loss: at the end of the last stage; None: outputs only.
        training: as for layers.
        scale: of the loss when gradients are taken; None: without gradients.
    """

    microbatches: Sequence[MicroBatch]
    loss: Loss | None
    training: bool
    scale: float | None = None


@dataclass(frozen=True)
class _Recorded:
    """State of a forward pass that its backward pass needs."""

    tape: tf.GradientTape
    sources: Sequence[Any]
    outputs: Sequence[Any]
    loss: Any


class KerasStage(Stage):
    """See `Stage`.

    Args:
        module: its layers.
        structure: of the model's outputs, in terms of positions in what the module returns; only in the last stage.

    Attributes:
        gradients: of variables, by their ids, added up over the micro-batches so far.
        outputs: of the model, by micro-batch; of the last stage.
        loss: what this stage has added to the loss, weighted by the micro-batches' fractions.
    """

    def __init__(self, module: StageModule, structure: Any = None) -> None:
        self.module = module
        self.gradients: dict[int, Any] = {}
        self.outputs: dict[int, Any] = {}
        self._structure = structure
        self._losses: list[tuple[float, Any]] = []
        self._recorded: dict[int, _Recorded] = {}
        self._weights: dict[int, Sequence[Any]] = {}
        self._run: BatchPass | None = None
        self._call = tf.function(self._traced, autograph=False)

    def begin_run(self, run: BatchPass) -> None:
        """Drop the last run, and begin this one."""
        self._run = run
        for kept in (self.gradients, self.outputs, self._recorded, self._weights):
            kept.clear()
        self._losses.clear()

    @property
    def loss(self) -> float:
        """See the class."""
        return sum(fraction * float(tf.cast(loss, tf.float64)) for fraction, loss in self._losses)

    @override
    def forward(self, microbatch: int, received: Message | None) -> Message | None:
        run = self._run
        assert run is not None
        part = run.microbatches[microbatch]
        taken = [] if received is None else list(received.tensors)
        if run.scale is None:
            with _telling_first_what_happened():
                outputs, loss = self._compute(run, part, taken)
        else:
            sources = [tensor for tensor in taken if tensor.dtype.is_floating]
            with _telling_first_what_happened(), tf.GradientTape() as tape:
                tape.watch(sources)
                outputs, loss = self._compute(run, part, taken)
            self._recorded[microbatch] = _Recorded(tape, sources, outputs, loss)
        if loss is not None:
            self._losses.append((part.fraction, loss))
        if self._structure is not None:
            self.outputs[microbatch] = self._packed(outputs)
            return None
        forms = (
            TensorForm(tuple(each.shape), dtype_of(each), each.dtype.is_floating and run.scale is not None)
            for each in outputs
        )
        return Message(Form(tuple(forms)), outputs)

    @override
    def backward(self, microbatch: int, gradients: Message | None) -> Message | None:
        made = self.backward_input(microbatch, gradients)
        self.backward_weight(microbatch)
        return made

    @override
    def backward_input(self, microbatch: int, gradients: Message | None) -> Message | None:
        """See `Stage.backward_input`: the gradients of the weights are computed along with those of the input."""
        run, recorded = self._run, self._recorded.pop(microbatch)
        assert run is not None
        assert run.scale is not None
        targets, seeds = [], []
        if gradients is not None:
            found = iter(gradients.tensors)
            wanted = [output for output in recorded.outputs if output.dtype.is_floating]
            for output, is_there in zip(wanted, gradients.form.structure, strict=True):
                if is_there:
                    targets.append(output)
                    seeds.append(next(found))
        if recorded.loss is not None:
            targets.append(recorded.loss)
            seeds.append(tf.constant(run.scale * run.microbatches[microbatch].fraction, recorded.loss.dtype))
        variables = self.module.trainable_variables
        sources = [*recorded.sources, *variables]
        results = recorded.tape.gradient(targets, sources, output_gradients=seeds) if targets else [None] * len(sources)
        self._weights[microbatch] = results[len(recorded.sources) :]
        if self._structure is not None and not recorded.sources:
            return None
        inner = [None if each is None else tf.convert_to_tensor(each) for each in results[: len(recorded.sources)]]
        there = [each for each in inner if each is not None]
        forms = tuple(TensorForm(tuple(each.shape), dtype_of(each)) for each in there)
        return Message(Form(forms, tuple(each is not None for each in inner)), there)

    @override
    def backward_weight(self, microbatch: int) -> None:
        for variable, gradient in zip(self.module.trainable_variables, self._weights.pop(microbatch), strict=True):
            if gradient is not None:
                key = id(variable)
                self.gradients[key] = added(self.gradients[key], gradient) if key in self.gradients else gradient

    def _compute(self, run: BatchPass, part: MicroBatch, taken: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        """Return the values that the stage passes on, and what it adds to the loss, or None."""
        outputs, extra = self._call(list(taken), list(part.inputs), run.training)
        losses = list(extra) if run.loss is not None else []
        if self._structure is not None and run.loss is not None:
            loss = run.loss(part.targets, self._packed(outputs), part.sample_weight)
            return outputs, tf.add_n([loss, *(tf.cast(each, loss.dtype) for each in losses)])
        return outputs, tf.add_n(losses) if losses else None

    def _traced(self, taken: list[Any], inputs: list[Any], training: bool) -> tuple[list[Any], list[Any]]:
        outputs = self.module(taken, inputs, training=training)
        losses = losses_of(self.module)
        kinds = dict.fromkeys(loss.dtype for loss in losses)
        return outputs, [tf.add_n([loss for loss in losses if loss.dtype == kind]) for kind in kinds]

    def _packed(self, outputs: Sequence[Any]) -> Any:
        return keras.tree.map_structure(lambda place: outputs[place], self._structure)


@contextmanager
def _telling_first_what_happened() -> Iterator[None]:
    """Put the cause before the rest of TensorFlow's error from a graph: other ranks see one line only."""
    try:
        yield
    except tf.errors.OpError as error:
        found = re.search(r"^\w*(?:Error|Exception): .+$", error.message, re.MULTILINE)
        if found is None or error.message.startswith(found[0]):
            raise
        kind: Any = type(error)
        raise kind(error.node_def, error.op, f"{found[0]}\n{error.message}") from error


def added(first: Any, second: Any) -> Any:
    """Return the sum of two gradients; of sparse ones a sparse one."""
    if isinstance(first, tf.IndexedSlices) and isinstance(second, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([first.values, second.values], 0),
            tf.concat([first.indices, second.indices], 0),
            first.dense_shape,
        )
    return tf.convert_to_tensor(first) + tf.convert_to_tensor(second)
