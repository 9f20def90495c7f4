"""The whole batch, gathered from the ranks: for losses that compare samples with each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from unidist.errors import OperationError
from unidist.runtime import context
from unidist.training.sample_axis import SampleAxis
from unidist_tensorflow.gradients.custom import pair
from unidist_tensorflow.gradients.tensors import host_node
from unidist_tensorflow.memory import Array, buffer_of_array, empty_array

_NAME = "unidist_gather_of_samples_which_needs_jit_compile_False"


def gather_samples(tensor: Any) -> tf.Tensor:
    """Return the rows of all ranks that have different samples, in rank order: the whole batch.

    For losses over pairs of samples (CLIP, SimCLR), memory banks and metrics. With the average of the ranks' gradients
    (`distribute`, `TrainStep`) training matches one process whose loss is the mean of the ranks' losses. A rank may
    compute the loss of the whole batch, or the loss of its local rows against all rows. (`allgather` differs: it also
    gathers from ranks that train on the same samples, and its gradient is Horovod's.)

    Collective over the ranks that have different samples, and so is its gradient. In graphs too.

    Args:
        tensor: `(rows, ...)`; all dims but the first are equal on every rank. Integers and bools have no gradient.

    Raises:
        NotInitializedError: `init()` was not called.
        OperationError: it has no rows.
        PeerLostError: a rank is gone, or did not come in time.
    """
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank == 0:
        raise OperationError("gather_samples gathers rows; a scalar has none")
    axis = context.current().owned(SampleAxis)
    if axis.size == 1:
        return tensor

    def gather(own: Any) -> list[Array]:
        source = np.ascontiguousarray(own)
        rows = axis.rows_of_all(len(source))
        target = empty_array((sum(rows), *source.shape[1:]), source.dtype)
        axis.gather(buffer_of_array(source), buffer_of_array(target), rows)
        return [target]

    def scatter_sum(whole: Any, own_rows: Any) -> list[Array]:
        source = np.ascontiguousarray(whole)
        rows = axis.rows_of_all(int(own_rows))
        target = empty_array((rows[axis.rank], *source.shape[1:]), source.dtype)
        axis.scatter_sum(buffer_of_array(source), buffer_of_array(target), rows)
        return [target]

    def node(run: Any, given: tf.Tensor, *others: tf.Tensor) -> tf.Tensor:
        spec = tf.TensorSpec([None, *given.shape[1:]], given.dtype)
        [found] = host_node(run, [given, *others], [spec], name=_NAME)
        return found

    if not tensor.dtype.is_floating:
        return node(gather, tensor)
    own_rows = tf.shape(tensor)[0]  # of this call: a graph may run again before the gradient is computed
    return pair(lambda own: node(gather, own), lambda whole: node(scatter_sum, whole, own_rows))(tensor)
