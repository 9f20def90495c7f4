"""One process of the same with TensorFlow's ParameterServerStrategy: its role is in TF_CONFIG; see `straggler`.

Its model does not go through Keras, whose `fit` has no ParameterServerStrategy any more. A worker sleeps in its input
pipeline, for the microseconds in the file `pause` of its working folder, the only thing that workers do not share.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_experimental_dataset_ops

_WARM_UP = 30


def paused() -> Any:
    """Return a data set whose elements each take as long as the worker's file says."""
    endless = tf.data.Dataset.from_tensors(tf.ones((8, 64))).repeat()
    microseconds = tf.strings.to_number(tf.io.read_file("pause"), tf.int64)

    class Slept(tf.data.Dataset):
        def __init__(self, source: Any) -> None:
            self._source = source
            variant = gen_experimental_dataset_ops.sleep_dataset(
                source._variant_tensor, microseconds, **source._flat_structure
            )
            super().__init__(variant)

        def _inputs(self) -> list[Any]:
            return [self._source]

        @property
        def element_spec(self) -> Any:
            return self._source.element_spec

    return Slept(endless)


def main(seconds: float) -> None:
    """Serve, or coordinate for some seconds and print the steps per second of all workers."""
    tf.config.threading.set_inter_op_parallelism_threads(8)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        tf.distribute.Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
        ).join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        first = tf.Variable(tf.random.normal((64, 256), stddev=0.1))
        second = tf.Variable(tf.random.normal((256, 64), stddev=0.1))

    @tf.function
    def step(iterator: Any) -> None:
        inputs = next(iterator)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.nn.relu(inputs @ first) @ second))
        for variable, gradient in zip((first, second), tape.gradient(loss, (first, second)), strict=True):
            variable.assign_sub(1e-3 * gradient)

    data = iter(coordinator.create_per_worker_dataset(paused))
    for _ in range(_WARM_UP):
        coordinator.schedule(step, args=(data,))
    coordinator.join()
    done = [0]
    lock = threading.Lock()
    begun = time.monotonic()
    values: list[Any] = []
    while time.monotonic() - begun < seconds:
        values.append(coordinator.schedule(step, args=(data,)))
        if len(values) >= 12:  # a few for each worker are under way
            values.pop(0).fetch()
            with lock:
                done[0] += 1
    print(done[0] / (time.monotonic() - begun), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
