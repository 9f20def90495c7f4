"""Two epochs of a model whose samples take long to decode: in the loop, by worker processes, and by data workers.

Run by `python -m benchmarks`; as a program it is the only rank of a job with `--data-workers 1`:

    python -m benchmarks.data_service RESULT REPETITIONS FRAMEWORK

Each way of reading trains two epochs in turn, and so does a loop over batches that are in memory already: what is left
is the wait for data. PyTorch's samples are decoded by arithmetic in Python, TensorFlow's from JPEG; both keep one core
busy for about as long as the step, which multiplies matrices.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

NUM_SAMPLES, BATCH, SIZE = 256, 16, 64
DECODE_LOOPS = 5_000
"""Steps of a loop in Python for each sample of PyTorch's."""
JPEG_SIZE = 384
"""Height and width of TensorFlow's samples before they are cropped to `SIZE`."""
WIDTH, NUM_PRODUCTS = 512, 8
"""A training step multiplies square matrices of this width, so often: about as long as a batch decodes."""

Epochs = Callable[[], Iterable[Any]]


def decode(index: int) -> float:
    """Return a sample that takes a while."""
    value = index
    for _ in range(DECODE_LOOPS):
        value = (value * 1103515245 + 12345) & 0x7FFFFFFF
    return value / 0x7FFFFFFF


def measure(ways: dict[str, Epochs], step: Callable[[Any], None], repetitions: int) -> dict[str, float]:
    """Return the median time of two epochs, by name of the way to read; each takes its turn in every repetition."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(repetitions + 1):  # the first one is not counted: processes start in it
        for name, epochs in ways.items():
            began = time.perf_counter()
            for _ in range(2):
                for batch in epochs():
                    step(batch)
            if repetition:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in times.items()}


def in_torch(repetitions: int) -> dict[str, float]:
    """Measure with PyTorch: in the loop, DataLoader's worker process, and one data worker."""
    import torch
    from torch.utils.data import DataLoader

    import unidist.torch as ud

    torch.set_num_threads(1)
    ud.init()
    data = _Samples()
    workers = DataLoader(data, batch_size=BATCH, num_workers=1, persistent_workers=True)
    loop, beside = DataLoader(data, batch_size=BATCH), ud.shard(workers)
    served = ud.data_service(ud.shard(loop))
    ready = list(ud.shard(loop))
    weight = torch.rand(WIDTH, WIDTH)

    def step(batch: Any) -> None:
        for _ in range(NUM_PRODUCTS):
            torch.mm(weight, weight)

    found = measure(
        {
            "decoded before": lambda: ready,
            "decoding in the loop": lambda: ud.shard(loop),
            "DataLoader, num_workers=1": lambda: beside,
            "--data-workers 1": lambda: served,
        },
        step,
        repetitions,
    )
    ud.shutdown()
    return found


def in_tensorflow(repetitions: int) -> dict[str, float]:
    """Measure with TensorFlow: in the loop, tf.data's service with one worker process, and one data worker.

    A `tf.data.Dataset` decodes the next batch in a thread while the step computes, unless its options forbid that: so
    there are both, the loop that waits for each batch and the one whose thread decodes.
    """
    import subprocess

    import tensorflow as tf

    import unidist.tensorflow as ud

    tf.config.threading.set_intra_op_parallelism_threads(1)
    ud.init()

    served = ud.data_service(_dataset_of_part)
    dispatcher = tf.data.experimental.service.DispatchServer()
    worker = subprocess.Popen([sys.executable, "-m", __spec__.name, dispatcher.target, "0", "tf.data worker"])
    try:
        loop = _dataset(0, 1)
        distributed = loop.apply(tf.data.experimental.service.distribute("parallel_epochs", dispatcher.target))
        ready = list(loop)
        waits = tf.data.Options()
        waits.experimental_optimization.apply_default_optimizations = False
        waiting = loop.with_options(waits)
        weight = tf.random.uniform((WIDTH, WIDTH))

        def step(batch: Any) -> None:
            for _ in range(NUM_PRODUCTS):
                tf.linalg.matmul(weight, weight)

        return measure(
            {
                "decoded before": lambda: ready,
                "decoding in the loop": lambda: waiting,
                "tf.data, decoding in a thread": lambda: loop,
                "tf.data's service, 1 worker": lambda: distributed,
                "--data-workers 1": lambda: served,
            },
            step,
            repetitions,
        )
    finally:
        worker.kill()
        worker.wait()
        ud.shutdown()


def serve_tf_data(dispatcher: str) -> None:
    """Be the worker process of tf.data's own service."""
    import tensorflow as tf

    config = tf.data.experimental.service.WorkerConfig(dispatcher_address=dispatcher.partition("://")[2])
    tf.data.experimental.service.WorkerServer(config).join()


class _Samples:
    """A dataset for PyTorch."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.full((3, SIZE, SIZE), decode(index)), index


def _dataset(index: int, count: int) -> Any:
    """Return batches of a part of the samples.

    tf.data decodes on every core at once, however the dataset is written, unless its options forbid that; then there
    would be no core left for the step.
    """
    import tensorflow as tf

    noise = tf.random.Generator.from_seed(0).uniform((4, JPEG_SIZE // 4, JPEG_SIZE // 4, 3)) * 255
    whole = tf.cast(tf.image.resize(noise, (JPEG_SIZE, JPEG_SIZE)), tf.uint8)
    files = tf.stack([tf.io.encode_jpeg(image) for image in whole])

    def sample(number: Any) -> Any:
        image = tf.io.decode_jpeg(files[number % 4], channels=3)[:SIZE, :SIZE]
        return tf.transpose(tf.cast(image, tf.float32) / 255, (2, 0, 1)), number

    in_one_thread = tf.data.Options()
    in_one_thread.experimental_optimization.map_parallelization = False
    plain = tf.autograph.experimental.do_not_convert(sample)
    numbers = tf.data.Dataset.range(NUM_SAMPLES).shard(count, index)
    return numbers.map(plain).batch(BATCH).with_options(in_one_thread)


def _dataset_of_part(shard: Any) -> Any:
    return _dataset(shard.index, shard.count)


if __name__ == "__main__":
    path, count, framework = sys.argv[1:]
    if framework == "tf.data worker":
        serve_tf_data(path)
    else:
        medians = {"torch": in_torch, "tensorflow": in_tensorflow}[framework](int(count))
        Path(path).write_text(json.dumps(medians), encoding="utf-8")
