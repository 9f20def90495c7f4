"""The gather of samples for losses over the whole batch, in TensorFlow: values, and gradients of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from part_pools import PartPools

pytest.importorskip("tensorflow", reason="the training is in TensorFlow")

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return tensorflow_pools


def test_a_loss_over_all_pairs_has_the_gradient_of_one_process(tensorflow_pools: PartPools) -> None:
    def on_rank() -> None:
        import tensorflow as tf

        import unidist.tensorflow as ud

        def loss(rows: Any) -> Any:
            logits = tf.linalg.matmul(rows, rows, transpose_b=True)
            return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(rows)[0]), logits))

        def step(weights: Any, samples: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(weights)
                value = loss(ud.gather_samples(tf.tanh(samples @ weights)))
            return value, ud.allreduce(tape.gradient(value, weights))

        ud.init()
        rank, size = ud.rank(), ud.size()
        generator = np.random.default_rng(1)
        weights, whole = tf.constant(generator.normal(size=(5, 4))), generator.normal(size=(6, 5))
        with tf.GradientTape() as tape:
            tape.watch(weights)
            wanted = loss(tf.tanh(whole @ weights))
        gradient = tape.gradient(wanted, weights)
        for cuts in ([0, 3, 6], [0, 1, 6]):  # as many samples on both, and not
            own = tf.constant(whole[cuts[rank] : cuts[rank + 1]])
            for run in (step, tf.function(step, jit_compile=False)):
                value, found = run(weights, own)
                np.testing.assert_allclose(value, wanted, rtol=1e-12)
                np.testing.assert_allclose(found, gradient, rtol=1e-10, atol=1e-14)

        @tf.function(input_signature=[tf.TensorSpec([None, 5], tf.float64)], jit_compile=False)
        def gathered(rows: Any) -> Any:
            return ud.gather_samples(rows)

        # Two batches, divided in other ways, before the gradient of either.
        first, second = (tf.constant(whole[cuts[rank] : cuts[rank + 1]]) for cuts in ([0, 1, 6], [0, 4, 6]))
        with tf.GradientTape() as tape:
            tape.watch([first, second])
            value = loss(gathered(first)) + loss(gathered(second))
        with tf.GradientTape() as alone:
            rows = tf.constant(whole)
            alone.watch(rows)
            single = loss(rows)
        expected = size * alone.gradient(single, rows).numpy()
        for found, cuts in zip(tape.gradient(value, [first, second]), ([0, 1, 6], [0, 4, 6]), strict=True):
            np.testing.assert_allclose(found, expected[cuts[rank] : cuts[rank + 1]], rtol=1e-10, atol=1e-14)
        labels = ud.gather_samples(tf.fill([rank + 1], rank))
        np.testing.assert_array_equal(labels, [place for place in range(size) for _ in range(place + 1)])
        ud.shutdown()

    tensorflow_pools.get(2).run(on_rank)
