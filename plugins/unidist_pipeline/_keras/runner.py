"""Runs steps of a Keras model that is a pipeline: cuts batches, runs the stages, gives gradients to the optimizer."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from unidist.buffer import Buffer, DType
from unidist.errors import ConfigurationError, UsageError
from unidist.negotiation.objects import gather_objects
from unidist.runtime import context as runtime
from unidist.runtime.of_context import OfContext
from unidist_keras.mixin import scales_loss
from unidist_pipeline._keras.division import DIVISION, Division
from unidist_pipeline._keras.fit import PipelineFit
from unidist_pipeline._keras.losses import check_loss, mean_loss
from unidist_pipeline._keras.stage import BatchPass, KerasStage, Loss, MicroBatch, added
from unidist_pipeline._keras.tied import TiedVariables
from unidist_pipeline._keras.tracing.program import Ref
from unidist_pipeline.execution.microbatches import bounds, sizes
from unidist_pipeline.execution.rank import PipelineRank
from unidist_tensorflow.framework import TensorFlowFramework
from unidist_tensorflow.memory import (
    NUMPY_DTYPES,
    array_of,
    buffer_of,
    buffer_of_array,
    dtype_of,
    empty_array,
    tensor_of_array,
)
from unidist_tensorflow.training.step_runner import StepRunner

if TYPE_CHECKING:
    from unidist.communicator import Communicator
    from unidist_pipeline._keras.model import PipelineModel
    from unidist_pipeline.strategy import Pipeline

_PRINTED_BYTES = 1 << 16


class PipelineRunner(StepRunner):
    """See `StepRunner`. Collective over the pipeline when it is made, and when it is first used in a generation.

    Args:
        strategy: the user's choices.
        model: as `Pipeline.partition` returned it; on a rank that joins an elastic job later, as `before_joining` did.
        loss_fn: see `StepRunner`.
        optimizer: the bound one.
    """

    def __init__(self, strategy: Pipeline, model: PipelineModel, loss_fn: Any, optimizer: Any) -> None:
        if scales_loss(optimizer):
            raise UsageError(
                "a LossScaleOptimizer looks for overflows in this rank's stages of a pipeline only. Give the plain "
                "optimizer and --strategy precision=fp16, which looks on all ranks, or use bfloat16"
            )
        self._strategy = strategy
        self._model = model
        self._optimizer = optimizer
        self._num_microbatches = strategy.num_microbatches
        self._ranks = OfContext(self._joined)
        self._loss: Loss | None = None
        if DIVISION in model.__dict__:
            self._ranks()
        if loss_fn is not None:
            check_loss(loss_fn, masked=self.masks_outputs)
            self._loss = mean_loss(loss_fn)

    def _joined(self) -> _Ranks:
        context = runtime.current()
        rank = PipelineRank(context, self._strategy, TensorFlowFramework())
        return _Ranks(rank, TiedVariables(rank, self._division.tied))

    @property
    def _division(self) -> Division:
        division: Division = self._model.__dict__[DIVISION]
        return division

    @property
    def _rank(self) -> PipelineRank:
        return self._ranks().rank

    @functools.cached_property
    def _stages(self) -> dict[int, KerasStage]:
        """This rank's stages, by number. They stay in each generation, and so do their functions."""
        last = len(self._rank.schedule(1).placement) - 1
        return {
            number: KerasStage(module, self._structure() if number == last else None)
            for number, module in self._division.modules.items()
        }

    @property
    def communicator(self) -> Communicator:
        """Along the pipeline."""
        return self._rank.communicator

    @property
    def has_outputs(self) -> bool:
        """The last stage is on this rank."""
        return self._root == self._rank.rank

    @property
    def _root(self) -> int:
        """The rank of the pipeline that has the last stage."""
        return self._rank.schedule(1).placement[-1]

    @property
    def outputs_structure(self) -> Any:
        """The structure that the model returns; its leaves mean nothing."""
        return self._division.programs[0].outputs

    @property
    def masks_outputs(self) -> bool:
        """Return whether a Keras mask would reach the loss."""
        program = self._division.programs[0]
        return any(program.values[number].masked for number in program.returned)

    @override
    def run(self, inputs: Any, targets: Any) -> tf.Tensor:
        assert self._loss is not None
        return self.train(inputs, targets, None, self._loss, training=True)

    @override
    def evaluate(self, inputs: Any, targets: Any) -> tf.Tensor:
        assert self._loss is not None
        return self.compute(inputs, targets, None, self._loss)

    @override
    def predict(self, inputs: Any) -> Any:
        with self._rank.guarded():
            self._go("prediction", inputs, None, None, loss=None, training=False)
            return self._spread(self.outputs() if self.has_outputs else None)

    @override
    def prepare_fit(self) -> None:
        model = self._model
        if model.overridden:
            raise ConfigurationError(
                f"the model has its own {' and '.join(model.overridden)}, which a pipeline cannot run: the "
                "other stages are on other ranks. Use TrainStep(model, optimizer, loss_fn) in a loop of your own"
            )
        if model.compiled_with:
            model.compile(self._optimizer, **model.compiled_with)
        model.fit_by(PipelineFit(self, model))

    def train(self, inputs: Any, targets: Any, sample_weight: Any, loss: Loss, *, training: bool) -> tf.Tensor:
        """Run one step, and give the gradients to the optimizer. Collective over all ranks.

        Args:
            inputs: see `StepRunner.run`.
            targets: the same.
            sample_weight: for the loss; or None.
            loss: to be minimized.
            training: as for layers.

        Returns:
            The loss, equal on every rank of the pipeline.
        """
        with self._rank.guarded():
            scale = float(self._optimizer.scale_loss(tf.constant(1.0, tf.float64)))
            self._go("training", inputs, targets, sample_weight, loss=loss, training=training, scale=scale)
            gradients: dict[int, Any] = {}
            for stage in self._stages.values():
                for key, gradient in stage.gradients.items():
                    gradients[key] = added(gradients[key], gradient) if key in gradients else gradient
                stage.gradients.clear()
            self._ranks().tied.add_up(gradients)
            total = self._total()
            variables = self._model.trainable_variables
            if not variables:
                raise UsageError("the stages of this rank have nothing to train any more; unfreeze a layer of them")
            self._optimizer.apply([gradients.get(id(each)) for each in variables], variables)
            return total

    def compute(self, inputs: Any, targets: Any, sample_weight: Any, loss: Loss) -> tf.Tensor:
        """Return the loss as in inference; arguments as for `train`. Collective over the pipeline."""
        with self._rank.guarded():
            self._go("evaluation", inputs, targets, sample_weight, loss=loss, training=False)
            return self._total()

    def outputs(self) -> Any:
        """Return the model's outputs of the last run, on the rank of the last stage."""
        made = self._stages[max(self._stages)].outputs
        parts = [made[number] for number in sorted(made)]
        return keras.tree.map_structure(lambda *each: tf.concat(each, 0) if len(each) > 1 else each[0], *parts)

    def _go(
        self,
        what: str,
        inputs: Any,
        targets: Any,
        sample_weight: Any,
        *,
        loss: Loss | None,
        training: bool,
        scale: float | None = None,
    ) -> None:
        """Run the forward passes of all micro-batches, and the backward passes if there is a scale."""
        program = self._division.programs[0 if training else 1]
        flat = program.standardize(inputs)
        leaves = [*flat, *(each for each in keras.tree.flatten((targets, sample_weight)) if each is not None)]
        num_samples = _num_samples(leaves)
        parts = sizes(num_samples, self._num_microbatches)

        def cut(first: int, stop: int, structure: Any) -> Any:
            return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[first:stop], structure)

        microbatches = [
            MicroBatch(
                cut(first, stop, flat),
                cut(first, stop, targets),
                cut(first, stop, sample_weight),
                (stop - first) / num_samples,
            )
            for first, stop in bounds(parts)
        ]
        run = BatchPass(microbatches, loss, training, scale)
        keys: list[Hashable] = [
            (what, training, tuple((tuple(leaf.shape), leaf.dtype.name) for leaf in part.inputs))
            for part in microbatches
        ]

        def begin() -> None:
            for stage in self._stages.values():
                stage.begin_run(run)

        description = f"{what} on {', '.join(_described(leaf) for leaf in leaves)}"
        self._rank.run(self._stages, description=description, keys=keys, forward_only=scale is None, before=begin)

    def _structure(self) -> Any:
        """Return the structure of the model's outputs, in terms of positions in what the last stage returns."""
        program = self._division.programs[0]
        places = {number: place for place, number in enumerate(program.returned)}

        def place_of(leaf: Any) -> Any:
            return places[leaf.number] if isinstance(leaf, Ref) else leaf

        return keras.tree.map_structure(place_of, program.outputs)

    def _total(self) -> tf.Tensor:
        """Return the loss of all stages together."""
        buffer = Buffer.allocate(1, DType.FLOAT64)
        numbers = buffer.bytes().cast("d")
        numbers[0] = sum(stage.loss for stage in self._stages.values())
        self.communicator.allreduce(buffer, buffer).wait()
        return tf.constant(numbers[0], keras.config.floatx())

    def _spread(self, outputs: Any) -> Any:
        """Return the outputs of the rank that has them on every rank."""
        flat = [] if outputs is None else [tf.convert_to_tensor(each) for each in keras.tree.flatten(outputs)]
        forms = gather_objects(self.communicator, [(tuple(each.shape), dtype_of(each)) for each in flat])[self._root]
        results = []
        for place, (shape, dtype) in enumerate(forms):
            if self.has_outputs:
                self.communicator.broadcast(buffer_of(flat[place]), root=self._root).wait()
                results.append(flat[place])
            else:
                array = empty_array(shape, NUMPY_DTYPES[dtype])
                self.communicator.broadcast(buffer_of_array(array), root=self._root).wait()
                results.append(tensor_of_array(array))
        return keras.tree.pack_sequence_as(self._division.programs[1].outputs, results)


@dataclass(frozen=True)
class _Ranks:
    """Parts of a runner that belong to the ranks of one generation."""

    rank: PipelineRank
    tied: TiedVariables


def _num_samples(leaves: Sequence[Any]) -> int:
    counts = {int(leaf.shape[0]) if leaf.shape.rank else -1 for leaf in leaves}
    if len(counts) != 1 or -1 in counts:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
        raise UsageError(
            "a pipeline cuts inputs, targets and weights of samples into micro-batches along their first dim, so all "
            f"must have one, of the same size. Found: {shapes}"
        )
    return counts.pop()


def _described(leaf: Any) -> str:
    """Return shape, type and a digest of (some of) the values: ranks with different data would compute nonsense."""
    if leaf.dtype == tf.string:
        raise UsageError("strings cannot go through a pipeline; turn them into numbers before, in the data set")
    flat = array_of(leaf).reshape(-1).view(np.uint8)
    step = -(-flat.size // _PRINTED_BYTES) | 1  # odd, so that it does not always meet the same byte of a number
    digest = hashlib.blake2b(flat[::step].tobytes(), digest_size=8).hexdigest()
    return f"{leaf.dtype.name}{list(leaf.shape)} (digest {digest})"
