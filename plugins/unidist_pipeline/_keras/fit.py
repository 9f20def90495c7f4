"""`fit`, `evaluate` and `predict` of a model that is a pipeline: its loss, its metrics, their results on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from unidist.errors import UsageError
from unidist.negotiation.objects import gather_objects
from unidist_pipeline._keras.losses import check_loss, targets_of_outputs
from unidist_tensorflow.training import before_step, structure_of

if TYPE_CHECKING:
    from unidist_pipeline._keras.model import PipelineModel
    from unidist_pipeline._keras.runner import PipelineRunner


class PipelineFit:
    """The steps of Keras' loops. Every rank makes the same calls.

    Metrics are updated on the rank of the last stage, on whole batches; it sends the results to the others.

    Args:
        runner: of the model.
        model: compiled before the first step.

    Attributes:
        results: of the metrics, as of the last step.
    """

    def __init__(self, runner: PipelineRunner, model: PipelineModel) -> None:
        self.results: dict[str, Any] = {}
        self._runner = runner
        self._model = model
        self._checked: Any = None
        self._compiled: Any = None

    def train(self, x: Any, y: Any, sample_weight: Any) -> dict[str, Any]:
        """Train on a batch; returns the metrics."""
        x, y, sample_weight = structure_of(x), structure_of(y), structure_of(sample_weight)
        self._check(sample_weight)

        def found() -> tuple[Any, Any]:
            return self._runner.predict(x), self._runner.compute(x, self._targets(y), sample_weight, self._loss)

        before_step(self._model, found, x, lambda outputs: self._loss_of_whole(y, outputs, sample_weight))
        loss = self._runner.train(x, self._targets(y), sample_weight, self._loss, training=self._model.takes_training)
        return self._measured(loss, x, y, sample_weight)

    def test(self, x: Any, y: Any, sample_weight: Any) -> dict[str, Any]:
        """Evaluate a batch; returns the metrics."""
        x, y, sample_weight = structure_of(x), structure_of(y), structure_of(sample_weight)
        self._check(sample_weight)
        loss = self._runner.compute(x, self._targets(y), sample_weight, self._loss)
        return self._measured(loss, x, y, sample_weight)

    def predict(self, x: Any) -> Any:
        """Return the outputs for a batch."""
        return self._runner.predict(structure_of(x))

    def _loss(self, targets: Any, outputs: Any, sample_weight: Any) -> Any:
        compiled_loss = self._model._compile_loss
        if not compiled_loss.built:  # its metrics are made, which a compiled function must not do
            return compiled_loss(targets, outputs, sample_weight)
        if self._compiled is None:
            self._compiled = tf.function(compiled_loss, autograph=False)
        return self._compiled(targets, outputs, sample_weight)

    def _loss_of_whole(self, y: Any, outputs: Any, sample_weight: Any) -> Any:
        """Return the loss as Keras computes it of a whole batch."""
        made = self._model._compile_loss
        fresh = type(made)(made._user_loss, made._user_loss_weights, output_names=made.output_names)
        return fresh(y, outputs, sample_weight)

    def _targets(self, y: Any) -> Any:
        model = self._model
        names = getattr(model, "output_names", None) or ()
        return targets_of_outputs(y, self._runner.outputs_structure, model._compile_loss._user_loss, names)

    def _check(self, sample_weight: Any) -> None:
        loss = self._model._compile_loss
        if loss is None:
            raise UsageError("the model was compiled without a loss: model.compile(optimizer, loss=...)")
        if loss is not self._checked:
            self._checked, self._compiled = loss, None
            for each in keras.tree.flatten(loss._user_loss):
                if each is not None:
                    weighted = sample_weight is not None
                    check_loss(keras.losses.get(each), masked=self._runner.masks_outputs, weighted=weighted)

    def _measured(self, loss: tf.Tensor, x: Any, y: Any, sample_weight: Any) -> dict[str, Any]:
        model, runner = self._model, self._runner
        found: dict[str, Any] = {}
        model._loss_tracker.update_state(loss, sample_weight=keras.tree.flatten(x)[0].shape[0])
        if runner.has_outputs:
            model.compute_metrics(x, y, runner.outputs(), sample_weight)
            found = {name: np.asarray(value) for name, value in model.own_metrics_result().items()}
        (self.results,) = (each for each in gather_objects(runner.communicator, found) if each)
        return dict(self.results)
