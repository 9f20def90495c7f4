"""Gradients of operations, by Horovod's rules: in eager mode, in functions and in sessions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from _modes import MODES, call, runtime

import unidist.tensorflow as ud
from unidist.jobs.pool.pool import RankPool

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


@pytest.fixture(params=[pytest.param("shm-2", marks=pytest.mark.soak), "shm-3", "single-1"])
def ranks(request: pytest.FixtureRequest, pool: Pool) -> RankPool:
    engine, size = request.param.split("-")
    return pool(int(size), engine)


def gradient(function: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """Return the gradient of a scalar function: by a tape, or in TF1 graphs by `tf.gradients`."""
    if not tf.executing_eagerly() and not getattr(x.graph, "building_function", False):
        return tf.gradients(function(x), x)[0]
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = function(x)
    return tape.gradient(value, x)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_every_operation(ranks: RankPool, mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            size, rank = ud.size(), ud.rank()
            rows = rank + 1
            weights = np.arange(1.0, 7.0) * (rank + 1)  # upstream gradients, different on every rank
            mean = np.arange(1.0, 7.0) * (size + 1) / 2
            x = np.linspace(1, 2, 6)

            def weighted(value: tf.Tensor, factors: np.ndarray = weights) -> tf.Tensor:
                return tf.reduce_sum(value * tf.constant(factors, value.dtype))

            cases: list[tuple[str, Callable[[tf.Tensor], tf.Tensor], np.ndarray, np.ndarray]] = [
                ("sum", lambda t: weighted(ud.allreduce(t, op=ud.Sum)), x, mean * size),
                ("average", lambda t: weighted(ud.allreduce(t)), x, mean),
                (
                    "scaled",
                    lambda t: weighted(ud.allreduce(t, op=ud.Sum, prescale_factor=0.5, postscale_factor=3.0)),
                    x,
                    1.5 * mean * size,
                ),
                ("compressed", lambda t: weighted(ud.allreduce(t, compression=ud.Compression.fp16)), x, mean),
                (
                    "grouped",
                    lambda t: (
                        weighted(ud.grouped_allreduce([t, 2 * t], op=ud.Sum)[0])
                        + weighted(ud.grouped_allreduce([t, 2 * t], op=ud.Sum)[1])
                    ),
                    x,
                    3 * mean * size,
                ),
                ("broadcast", lambda t: weighted(ud.broadcast(t, 0)), x, mean if rank == 0 else 0 * mean),
            ]
            total = size * (size + 1) // 2
            upstream = np.arange(1.0, total + 1) * (rank + 1)
            start = rank * (rank + 1) // 2
            own = np.arange(1.0, total + 1)[start : start + rows] * (size + 1) / 2
            share = np.ones(rows)
            cases += [
                ("allgather", lambda t: weighted(ud.allgather(t), upstream), share, own),
                (
                    "grouped_allgather",
                    lambda t: weighted(ud.grouped_allgather([3 * t, t])[0], upstream),
                    share,
                    3 * own,
                ),
            ]
            even = np.ones((2 * size, 2))
            ones = [np.full((2, 2), r + 1.0) for r in range(size)]
            cases += [
                (
                    "reducescatter",
                    lambda t: weighted(ud.reducescatter(t, op=ud.Sum), ones[rank]),
                    even,
                    size * np.concatenate(ones),
                ),
                (
                    "grouped_reducescatter",
                    lambda t: weighted(ud.grouped_reducescatter([t, t], prescale_factor=2.0)[1], ones[rank]),
                    even,
                    2 * np.concatenate(ones),
                ),
                (
                    "alltoall",
                    lambda t: weighted(ud.alltoall(t, [2] * size)[0], np.full((2 * size, 2), rank + 1.0)),
                    even,
                    np.concatenate(ones),
                ),
            ]
            for name, function, value, wanted in cases:
                found = call(mode, lambda t, function=function: gradient(function, t), value)
                np.testing.assert_allclose(found, wanted, rtol=1e-12, err_msg=f"{name} on rank {rank}")

    ranks.run(on_rank)


def test_second_derivatives(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            x = tf.constant([1.0 + ud.rank(), 3.0])
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    cubed = tf.reduce_sum(ud.allreduce(x, op=ud.Sum) ** 3)
                first = inner.gradient(cubed, x)
            second = outer.gradient(first, x)
            total = np.array([3.0, 6.0])
            np.testing.assert_allclose(first, 2 * 3 * total**2)
            np.testing.assert_allclose(second, 2 * 2 * 2 * 6 * total / 2)

    pool(2, "shm").run(on_rank)


def test_nothing_is_recorded_without_a_tape(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            x = tf.constant([1.0])
            with tf.GradientTape() as tape:
                tape.watch(x)
                with tape.stop_recording():
                    y = ud.allreduce(x)
            assert tape.gradient(y, x) is None

    pool(1, "single").run(on_rank)
