"""One training step in Keras under MultiWorkerMirroredStrategy, its ring. Run by `python -m benchmarks` on two ranks.

It has a process of its own, because it wants to be the first to use TensorFlow there; the step without communication
is measured beside it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import unidist.tensorflow as ud
from benchmarks.keras_network import batch, make_loop_step, network, unchanged, unidist_meeting
from unidist_bench import side_by_side


def make_strategy(ports: str) -> Any:
    """Return the strategy over processes of this host, given their ports: "4000,4001"."""
    workers = [f"127.0.0.1:{port}" for port in ports.split(",")]
    task = {"type": "worker", "index": int(os.environ["UNIDIST_RANK"])}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def make_strategy_step(strategy: Any) -> Callable[[], None]:
    """Return a function that does one step under the strategy, whose ring adds up what Keras' optimizer is given."""
    with strategy.scope():
        model, optimizer = network(), keras.optimizers.Adam(1e-4)
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = map(tf.constant, batch())

    def replica_step() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True)) / strategy.num_replicas_in_sync
        variables = [variable.value for variable in model.trainable_variables]
        optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)
        return loss

    @tf.function
    def step() -> Any:
        return strategy.run(replica_step)

    return lambda: step().numpy()


def main(output: str, repetitions: int, ports: str) -> None:
    """Measure, and let rank 0 write the medians (seconds) to `output`."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = make_strategy(ports)
    ud.init()
    medians = side_by_side(
        {
            "loop, no communication": make_loop_step(unchanged),
            "loop, MultiWorkerMirrored": make_strategy_step(strategy),
        },
        unidist_meeting(ud),
        repetitions=repetitions,
    )
    if ud.rank() == 0:
        with open(output, "w") as file:
            json.dump(medians, file)
    ud.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
