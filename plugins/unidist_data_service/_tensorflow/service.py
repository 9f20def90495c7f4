"""`data_service` for TensorFlow: a dataset of batches that data workers make."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import tensorflow as tf

from unidist.errors import UsageError
from unidist.jobs.pool import dump_call
from unidist.negotiation import seal
from unidist.runtime import context
from unidist_data_service._tensorflow.source import DatasetSource
from unidist_data_service.client import DataWorkers, StreamBatches
from unidist_data_service.shards import DataShard
from unidist_data_service.transport import numpy_array
from unidist_data_service.worker import PURPOSE
from unidist_tensorflow.training import measured


def data_service(
    function: Callable[[DataShard], Iterable[Any]],
    *,
    ahead: int = 2,
    tail: Literal["pad", "drop"] = "pad",
) -> tf.data.Dataset:
    """Return a dataset of batches that the job's data workers make, which `unidist launch --data-workers` starts.

        def batches(shard):  # runs in the data workers
            files = tf.data.Dataset.from_tensor_slices(names).shard(shard.count, shard.index)
            return files.shuffle(len(names)).map(decode).batch(32)

        model.fit(ud.data_service(batches))

    Each worker reads a part of the data, and makes batches of it. Every batch goes to one rank, and all ranks get
    equally many; ranks that hold parts of one model get the same ones. A worker that is lost is an error. All ranks
    have to call this.

    Args:
        function: returns the batches of a part of the data, as a tf.data.Dataset or any iterable over arrays. It is
            pickled (cloudpickle).
        ahead: number of batches that each worker is asked for at a time, at least 1.
        tail: what happens to a worker's last batches if they do not divide by the number of ranks. "pad" repeats the
            first ones of the epoch, "drop" leaves them out.

    Raises:
        UsageError: the function cannot be pickled, or the job is elastic.
        ConfigurationError: the job has no data workers.
        PeerLostError, StalledError: those that it has cannot be reached.
        DataWorkerError: the dataset has raised.
    """
    runtime = context.current()
    if runtime.is_elastic:
        raise UsageError(
            "data_service() in an elastic job: batches that were read ahead would be for ranks that are gone. Use "
            "ud.shard() there"
        )
    if not callable(function):
        raise UsageError(
            f"data_service() of a {type(function).__name__}: give a function that makes the dataset in a data worker"
        )
    sealed = bytes(seal(dump_call(DatasetSource, (function,), {}, to_other_machines=True), PURPOSE))
    batches = StreamBatches(runtime.owned(DataWorkers), sealed, numpy_array, ahead=ahead, tail=tail)
    dataset = tf.data.Dataset.from_generator(batches.__iter__, output_signature=_signature(batches.spec()))
    without_thread = tf.data.Options()
    without_thread.autotune.enabled = False  # it has nothing to tune here, and an epoch's end may wait for it
    return measured(dataset.prefetch(ahead).with_options(without_thread))


def _signature(tree: Any) -> Any:
    """Return the types and shapes of a tree that a worker has told."""
    kind, value = tree
    if kind == "array":
        dtype, shape = value
        return tf.TensorSpec(shape, tf.dtypes.as_dtype(dtype))
    if kind == "dict":
        return {name: _signature(each) for name, each in value}
    items = [_signature(each) for each in value]
    return tuple(items)
