"""Orders of samples that are the same on every rank, no matter how the script has seeded TensorFlow."""

from __future__ import annotations

from itertools import count

import numpy as np
import tensorflow as tf


def shuffle_identically(dataset: tf.data.Dataset, *, buffer_size: int, seed: tf.Tensor) -> tf.data.Dataset:
    """Return a dataset shuffled in an order that depends on `seed` alone. For functions that tf.data traces.

    Args:
        dataset: the same on every rank.
        buffer_size: samples that are held in memory.
        seed: an int64 scalar.
    """
    # TensorFlow mixes the seed of the graph into that of the operation, and the script's is often another on each rank.
    tf.compat.v1.get_default_graph().seed = None
    return dataset.shuffle(buffer_size, seed=seed, reshuffle_each_iteration=False)


def reshuffled(dataset: tf.data.Dataset, *, buffer_size: int, seed: int) -> tf.data.Dataset:
    """Return a dataset with another order in each iteration, the same on every rank."""
    epochs = count(seed)

    def epoch(_: tf.Tensor) -> tf.data.Dataset:
        number = tf.numpy_function(lambda: np.int64(next(epochs)), [], tf.int64)
        number.set_shape([])
        return shuffle_identically(dataset, buffer_size=buffer_size, seed=number)

    shuffled = tf.data.Dataset.range(1).flat_map(epoch)
    length = dataset.cardinality()
    return shuffled if length < 0 else shuffled.apply(tf.data.experimental.assert_cardinality(length))
