"""Batch normalisation over the samples of all ranks, by Horovod's name, for the Keras that `tf.keras` is."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from unidist.runtime import context
from unidist_tensorflow.keras_api import IS_LEGACY, api
from unidist_tensorflow.training.synchronized_norm import moments_over_ranks


@api.saving.register_keras_serializable(package="unidist")
class SyncBatchNormalization(api.layers.BatchNormalization):
    """A BatchNormalization whose statistics in training are those of the samples of all ranks.

    Every rank runs it equally often in training, on batches that may differ in size. Count, sum and sum of squares are
    added up over the ranks in float64, differentiably: the gradients are those of one process on all samples, once the
    optimizer has averaged them over the ranks.

    Args:
        fused: for Horovod's sake: False; a fused operation cannot ask other ranks.
        kwargs: of Keras' BatchNormalization.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        if kwargs.get("synchronized"):
            raise ValueError("synchronized=True is for tf.distribute; this layer is synchronised by unidist")
        if IS_LEGACY:
            kwargs["fused"] = False
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        """Return mean and variance; Keras' `call` asks for them in training.

        Keras 3 passes a mask on. tf_keras passes the axes on, whether to keep them (with length 1), and a mask.
        """
        if not context.is_initialized() or context.current().topology.world_size == 1:
            return super()._moments(inputs, *arguments, **options)
        if not IS_LEGACY:
            return moments_over_ranks(inputs, self._reduction_axes, *arguments, **options)

        def moments(axes: Any, keep_dims: bool, mask: Any = None) -> tuple[Any, Any]:
            mean, variance = moments_over_ranks(inputs, axes, mask)
            if keep_dims:
                shape = [1 if axis in axes else size for axis, size in enumerate(inputs.shape)]
                return tf.reshape(mean, shape), tf.reshape(variance, shape)
            return mean, variance

        return moments(*arguments, **options)
