"""Gradients that are exchanged in stages while backward goes on, over an engine that works by itself (gloo).

Every variable has a bucket of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _keras_training import OPTIMIZERS, alone, difference, runtime, together

import unidist.tensorflow as ud
from unidist.runner import RankPool
from unidist_tensorflow.training_distribute import DistributedOptimizer
from unidist_tensorflow.training_tensors import EXCHANGE_NAME

Pool = Callable[..., RankPool]
pytest.importorskip("torch", reason="the engine gloo is PyTorch's")
pytestmark = pytest.mark.parallel


@contextmanager
def small_buckets() -> Iterator[None]:
    """A runtime whose strategy gives every variable a bucket of its own."""
    os.environ["UNIDIST_STRATEGY"] = "data:bucket_mb=0.000001"
    try:
        with runtime():
            yield
    finally:
        del os.environ["UNIDIST_STRATEGY"]


def variable(value: float) -> Any:
    return keras.Variable([value], dtype="float64")


def stepper(optimizer: Any, variables: list[Any], gradients: list[float | None]) -> Any:
    """Return a `tf.function` that applies these gradients."""

    @tf.function
    def step() -> None:
        given = [None if each is None else tf.constant([each], tf.float64) for each in gradients]
        optimizer.apply(given, variables)

    return step


def exchange_nodes(step: Any) -> list[Any]:
    """Return the nodes of the exchange in a function's graph."""
    operations = step.get_concrete_function().graph.get_operations()
    return [operation for operation in operations if EXCHANGE_NAME in operation.name]


@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 4}])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [2, 3])
def test_same_weights_as_one_process_on_the_whole_batch(
    pool: Pool, size: int, optimizer: str, options: dict[str, Any]
) -> None:
    def on_rank() -> None:
        with small_buckets():
            for mode in ("fit",) if options else ("function", "fit"):
                found = together(mode, OPTIMIZERS[optimizer], **options)
                assert difference(found, alone(mode, OPTIMIZERS[optimizer])) < (1e-6 if optimizer == "adam" else 1e-12)

    pool(size, "gloo").run(on_rank)


def test_a_stage_is_two_nodes_and_the_last_one(pool: Pool) -> None:
    def on_rank() -> None:
        with small_buckets():
            variables = [variable(1.0) for _ in range(4)]
            step = stepper(DistributedOptimizer(keras.optimizers.SGD(1.0)), variables, [1.0, 2.0, 3.0, 4.0])
            step()
            assert [each.numpy().item() for each in variables] == [0.0, -1.0, -2.0, -3.0]
            assert len(exchange_nodes(step)) == 2 * 3 + 1

    pool(2, "gloo").run(on_rank)


def test_ranks_may_have_different_stages(pool: Pool) -> None:
    """Variables are exchanged from the last to the first, each rank's stages end where it has no gradient."""

    def on_rank() -> None:
        with small_buckets():
            variables = [variable(0.0) for _ in range(4)]
            missing = 1 + ud.rank()  # rank 0 has stages for 3 and 2, rank 1 for 3 only
            gradients = [None if place == missing else 2.0 for place in range(4)]
            step = stepper(DistributedOptimizer(keras.optimizers.SGD(1.0)), variables, gradients)
            for _ in range(3):
                step()
            assert len(exchange_nodes(step)) == 2 * (3 - missing) + 1
            np.testing.assert_allclose([each.numpy().item() for each in variables], [-6.0, -3.0, -3.0, -6.0])

    pool(2, "gloo").run(on_rank)


def test_a_rank_that_has_joined_takes_part(pool: Pool) -> None:
    def on_rank() -> None:
        with small_buckets():
            variables = [variable(0.0) for _ in range(3)]
            step = stepper(DistributedOptimizer(keras.optimizers.SGD(1.0)), variables, [2.0, 4.0, 6.0])
            for _ in range(1 + 2 * ud.rank()):
                step()
            ud.join()
            wanted = [-2.0 - 2.0 * ud.rank(), -4.0 - 4.0 * ud.rank(), -6.0 - 6.0 * ud.rank()]
            np.testing.assert_allclose([each.numpy().item() for each in variables], wanted)

    pool(2, "gloo").run(on_rank)


def test_a_tape_gives_gradients_that_stay(pool: Pool) -> None:
    def on_rank() -> None:
        with small_buckets():
            variables = [tf.Variable([float(place)], dtype=tf.float64) for place in range(3)]

            @tf.function
            def gradients() -> list[tf.Tensor]:
                with ud.DistributedGradientTape(tf.GradientTape()) as tape:
                    loss = tf.add_n([(1.0 + ud.rank()) * each * each for each in variables])
                found: list[tf.Tensor] = tape.gradient(loss, variables)
                return found

            first = gradients()
            for each in variables:
                each.assign_add([10.0])
            second = gradients()
            assert [each.numpy().item() for each in first] == [0.0, 3.0, 6.0]
            assert [each.numpy().item() for each in second] == [30.0, 33.0, 36.0]

    pool(2, "gloo").run(on_rank)


def test_a_clipped_norm_is_that_of_all_stages(pool: Pool) -> None:
    def on_rank() -> None:
        with small_buckets():
            variables = [variable(0.0) for _ in range(2)]
            optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=1.0))
            gradients: list[float | None] = [6.0, 8.0] if ud.rank() == 0 else [0.0, 0.0]
            stepper(optimizer, variables, gradients)()
            np.testing.assert_allclose([each.numpy().item() for each in variables], [-0.6, -0.8])

    pool(2, "gloo").run(on_rank)
