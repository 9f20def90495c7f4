"""A cross-entropy of logits that are cut over ranks: no rank ever has all logits of a token.

Shoeybi et al. 2019, section 3: of the loss, ranks exchange three numbers for each token, not its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from unidist.communicator import ReduceOp
from unidist_tensor_parallel._keras.layers.axis import TensorAxis
from unidist_tensor_parallel._keras.layers.cut import DenseColumn
from unidist_tensorflow.gradients import differentiable_once


class VocabularyCrossEntropy(keras.losses.Loss):  # type: ignore[misc]  # Keras has no types
    """Cross-entropy of integer targets and the logits of an output layer, which may be cut over ranks.

        loss = VocabularyCrossEntropy(model.get_layer("scores"))
        model.compile(optimizer, loss, jit_compile=False)  # or TrainStep(model, optimizer, loss)

    If the layer has the role `column`, it returns this rank's logits only, and ranks exchange three numbers for each
    token. Otherwise the loss is Keras' `SparseCategoricalCrossentropy(from_logits=True)`.

    Args:
        head: the `Dense` layer that returns the logits; None: they are whole.
        ignore_class: targets that do not count.
        reduction: see `keras.losses.Loss`.
        name: likewise.
        dtype: likewise.
    """

    def __init__(
        self,
        head: Any = None,
        *,
        ignore_class: int | None = None,
        reduction: str | None = "sum_over_batch_size",
        name: str = "vocabulary_cross_entropy",
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        self.ignore_class = ignore_class
        self._head = head

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return the loss of each token, 0 where it does not count, the same on all ranks of the axis. Collective.

        Args:
            y_true: `(...)` or `(..., 1)`, classes of the whole vocabulary.
            y_pred: `(..., n)`, logits as the layer has returned them.
        """
        head = self._head
        if not isinstance(head, DenseColumn) or head._cut_spec.gathers:
            return keras.losses.sparse_categorical_crossentropy(
                y_true, y_pred, from_logits=True, ignore_class=self.ignore_class
            )
        if len(y_true.shape) == len(y_pred.shape) and y_true.shape[-1] == 1:
            y_true = tf.squeeze(y_true, -1)
        targets = tf.reshape(tf.cast(y_true, tf.int64), [-1])
        counts = tf.fill(tf.shape(targets), True) if self.ignore_class is None else targets != self.ignore_class
        logits = tf.reshape(y_pred, [-1, y_pred.shape[-1]])
        losses = _token_losses(logits, targets, counts, head._cut_spec.axis, head._cut_spec.counts)
        losses = tf.reshape(losses, tf.shape(y_pred)[:-1])
        losses.set_shape(y_pred.shape[:-1])
        if self.ignore_class is not None:
            losses._keras_mask = tf.reshape(counts, tf.shape(losses))  # by which Keras takes the mean
        return losses

    def get_config(self) -> dict[str, Any]:
        """Return the arguments but for the layer: a loss made from them takes whole logits."""
        return {**super().get_config(), "ignore_class": self.ignore_class}


def _token_losses(
    logits: tf.Tensor, targets: tf.Tensor, counts: tf.Tensor, axis: TensorAxis, class_counts: Sequence[int]
) -> tf.Tensor:
    """Return the loss of each token, `(tokens,)`; NaN if a target is no class, as TensorFlow does on GPUs.

    Args:
        logits: `(tokens, class_counts[rank])`.
        targets: `(tokens,)` of int64.
        counts: `(tokens,)`, which of them count.
        axis: the exchanges.
        class_counts: classes of each rank.
    """
    own = class_counts[axis.rank]
    local = targets - sum(class_counts[: axis.rank])
    one_hot = tf.one_hot(
        tf.where(counts & (local >= 0) & (local < own), local, -1), own, dtype=tf.bool, on_value=True, off_value=False
    )
    is_class = (targets >= 0) & (targets < sum(class_counts))

    @differentiable_once("the loss over a divided vocabulary")
    def losses_of(given: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        wide = tf.cast(given, tf.float32) if given.dtype.size < 4 else given
        shifted = wide - axis.reduced(tf.reduce_max(wide, -1), ReduceOp.MAX)[:, None]
        exponentials = tf.exp(shifted)
        chosen = tf.reduce_sum(tf.where(one_hot, shifted, 0), -1)
        denominators, chosen = tf.unstack(axis.reduced(tf.stack([tf.reduce_sum(exponentials, -1), chosen])))
        losses = tf.where(is_class, tf.math.log(denominators) - chosen, float("nan"))

        def backward(gradient: tf.Tensor) -> tf.Tensor:
            result = exponentials / denominators[:, None] - tf.cast(one_hot, exponentials.dtype)
            return tf.cast(result * tf.where(counts, gradient, 0)[:, None], given.dtype)

        return tf.where(counts, losses, 0), backward

    return losses_of(logits)
