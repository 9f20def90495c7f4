"""`unidist launch --data-workers` with TensorFlow, and how long steps wait for their batches."""

from __future__ import annotations

import json

import pytest
from unidist_command import Command

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.parallel

_SCRIPT = """
    import json, pathlib
    import keras
    import numpy as np
    import tensorflow as tf
    import unidist.tensorflow as ud
    from unidist.runtime import context

    def wait(number):
        time.sleep(0.02)
        return number

    def decoded(numbers):
        @tf.autograph.experimental.do_not_convert
        def decode(number):
            number = tf.ensure_shape(tf.numpy_function(wait, [number], tf.int64), ())
            return tf.fill((3,), tf.cast(number, tf.float32)), tf.cast(number, tf.float32)

        return numbers.map(decode)

    def batches(shard):
        return decoded(tf.data.Dataset.range(22).shard(shard.count, shard.index)).batch(2)

    ud.init()
    recorder = context.current().recorder
    served = ud.data_service(batches)
    assert served.element_spec[0].shape.as_list() == [None, 3], served.element_spec
    found = [[[int(value) for value in y] for x, y in served] for _ in range(2)]
    pathlib.Path(f"found-{rank}").write_text(json.dumps(found))

    before, began = recorder.all_data_sec, time.monotonic()
    number = sum(1 for _ in ud.shard(decoded(tf.data.Dataset.range(16)), batch_size=2).prefetch(1))
    loop, all_of_it = recorder.all_data_sec - before, time.monotonic() - began
    assert number == 4
    assert 0.3 < loop <= all_of_it, (loop, all_of_it)  # every rank decodes all 16 samples, in 20 ms each

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model, optimizer = ud.distribute(model, keras.optimizers.SGD(1e-9))
    model.compile(optimizer, "mse", jit_compile=False)
    before, began = recorder.all_data_sec, time.monotonic()
    model.fit(ud.shard(decoded(tf.data.Dataset.range(16)), batch_size=2), epochs=2, verbose=0)
    waited, all_of_it = recorder.all_data_sec - before, time.monotonic() - began
    assert 0.6 < waited <= all_of_it, (waited, all_of_it)
    before = recorder.all_data_sec
    model.fit(np.zeros((64, 3)), np.zeros(64), verbose=0)
    assert recorder.all_data_sec == before
    ud.shutdown()
"""


def test_batches_of_workers_and_the_wait_for_batches(command: Command) -> None:
    done = command.run("launch", "-np", "2", "--data-workers", "2", command.script(_SCRIPT))
    assert done.returncode == 0, done.stderr
    first, second = [json.loads((command.folder / f"found-{rank}").read_text()) for rank in range(2)]
    assert first == [[[0, 2], [1, 3], [8, 10], [9, 11], [16, 18], [17, 19]]] * 2
    assert second == [[[4, 6], [5, 7], [12, 14], [13, 15], [20], [21]]] * 2
