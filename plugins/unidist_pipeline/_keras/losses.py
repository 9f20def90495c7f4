"""Loss functions whose value on a batch is the mean of the values on its micro-batches, weighted by their samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from unidist.errors import UsageError
from unidist_pipeline._keras.stage import Loss


def mean_loss(loss_fn: Any) -> Loss:
    """Return the mean of what a script's loss function returns, as a compiled function."""

    def mean(targets: Any, outputs: Any, sample_weight: Any) -> Any:
        return tf.reduce_mean(loss_fn(targets, outputs))

    compiled: Loss = tf.function(mean, autograph=False)
    return compiled


def check_loss(loss_fn: Any, *, masked: bool, weighted: bool = False) -> None:
    """Raise UsageError for a loss of Keras that is no mean over the samples.

    Args:
        loss_fn: a loss.
        masked: the model's outputs carry a mask, by which Keras weights.
        weighted: samples have weights.
    """
    if not isinstance(loss_fn, keras.losses.Loss):
        return
    reduction = loss_fn.reduction
    if reduction == "sum" or (reduction == "mean_with_sample_weight" and weighted):
        raise UsageError(
            f"the loss {loss_fn.name!r} has reduction={reduction!r}: of the micro-batches of a pipeline it is not the "
            "batch's. Use reduction='sum_over_batch_size', the default"
        )
    ignored = getattr(loss_fn, "ignore_class", None)
    if ignored is not None:
        raise UsageError(
            f"the loss {loss_fn.name!r} has ignore_class={ignored}: it is the mean over the targets that count, of "
            "which the micro-batches of a pipeline may have different numbers. Leave it out, and weight the loss by "
            "yourself: sample_weight in fit, or in the loss function"
        )
    if masked:
        raise UsageError(
            "the model's outputs carry a Keras mask, by which the loss would be weighted within each micro-batch of a "
            "pipeline and not within the batch. Leave mask_zero out of what leads to the outputs, and weight the loss "
            "by yourself: sample_weight in fit, or in the loss function"
        )


def targets_of_outputs(targets: Any, outputs: Any, losses: Any, names: Sequence[str]) -> Any:
    """Return targets in the structure of the outputs, where it is one tensor for the only output that has a loss.

    Keras finds that out for each batch, and takes a tensor of as many samples as there are outputs for their targets:
    of a whole batch that is rare, of a micro-batch it is not.

    Args:
        targets: of the batch.
        outputs: the structure that the model returns.
        losses: what `compile` got.
        names: of the outputs, flat.

    Raises:
        UsageError: it is not one output that has a loss.
    """
    if targets is None or keras.tree.is_nested(targets) or not keras.tree.is_nested(outputs):
        return targets
    num_outputs = len(keras.tree.flatten(outputs))
    if isinstance(losses, dict):
        flat = [losses.get(name) for name in (sorted(outputs) if isinstance(outputs, dict) else names)]
    else:
        flat = keras.tree.flatten(losses) if keras.tree.is_nested(losses) else [losses] * num_outputs
    wanted = [num_outputs == 1 or each is not None for each in flat]
    if len(wanted) != num_outputs or sum(wanted) != 1:
        raise UsageError(
            f"the model has {num_outputs} outputs, {sum(wanted)} of them with a loss, and one tensor as their targets. "
            "Give targets in the structure of the outputs"
        )
    return keras.tree.pack_sequence_as(outputs, [targets if each else None for each in wanted])
