"""Batch normalisation over the samples of all ranks, by Horovod's name."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import keras

from unidist.runtime import context
from unidist_jax.operations import Sum, allreduce


@keras.saving.register_keras_serializable(package="unidist")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """A BatchNormalization whose statistics in training are those of the samples of all ranks.

    Every rank runs it equally often in training, on batches that may differ in size. Sums are added up over the ranks
    in float32 at least, differentiably: the gradients are those of one process on all samples, once the optimizer has
    averaged them over the ranks.

    Args:
        fused: for Horovod's sake: False; a fused operation cannot ask other ranks.
        kwargs: of Keras' BatchNormalization.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        if kwargs.get("synchronized"):
            raise ValueError("synchronized=True is for tf.distribute; this layer is synchronised by unidist")
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Return mean and variance; Keras' `call` asks for them in training."""
        is_symbolic = keras.backend.is_keras_tensor(inputs)
        if is_symbolic or not context.is_initialized() or context.current().topology.world_size == 1:
            return super()._moments(inputs, mask)
        values = jnp.asarray(inputs, jnp.promote_types(inputs.dtype, jnp.float32))
        axes = tuple(self._reduction_axes)
        if mask is None:
            weights = jnp.ones_like(values)
        else:
            weights = jnp.broadcast_to(jnp.expand_dims(mask, -1).astype(values.dtype), values.shape)
        count, total = _summed(jnp.stack([weights.sum(axes), (values * weights).sum(axes)]))
        count = jnp.maximum(count, 1)
        mean = total / count
        shape = [1 if axis in axes else size for axis, size in enumerate(values.shape)]
        variance = _summed(((values - mean.reshape(shape)) ** 2 * weights).sum(axes)) / count
        return mean.astype(inputs.dtype), variance.astype(inputs.dtype)


def _summed(values: Any) -> Any:
    """Return the sum over all ranks; its gradient is the sum of all ranks' gradients."""
    # One name for all layers: they run in the order of the program, which is the same everywhere.
    return allreduce(values, op=Sum, name="sync_batch_norm")
