"""In graphs, too, what goes wrong is the error of TensorFlow that Horovod raises, with unidist's text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from _modes import MODES, call, runtime

import unidist.tensorflow as ud
from unidist.jobs.pool.pool import RankPool

pytestmark = pytest.mark.parallel
errors = tf.errors


def mismatches() -> dict[str, Callable[[Any], Any]]:
    """What the ranks call differently, by a word of the message."""
    root = ud.rank()
    return {
        "shape": lambda x: ud.allreduce(x[: 2 + root], name="s"),
        "float32": lambda x: ud.allreduce(tf.cast(x, tf.float64 if root else tf.float32), name="t"),
        "root": lambda x: ud.broadcast(x, root, name="r"),
        "dim 0": lambda x: ud.allgather(tf.reshape(x, [2, 2] if root else [4]), name="g"),
        "sum": lambda x: ud.allreduce(x, op=ud.Max if root else ud.Sum, name="o"),
    }


@pytest.mark.parametrize("mode", MODES)
def test_a_mismatch_is_a_failed_precondition_on_every_rank(pool: Callable[..., RankPool], mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            values = np.arange(4, dtype=np.float32)
            for function in mismatches().values():
                with pytest.raises(errors.FailedPreconditionError, match="rank"):
                    call(mode, function, values)
            mean = call(mode, lambda x: ud.allreduce(x, name="fine"), values)
            np.testing.assert_array_equal(mean, values)  # the runtime stays usable

    pool(2, "shm").run(on_rank)


@pytest.mark.parametrize("mode", MODES)
def test_misuse_is_an_invalid_argument(pool: Callable[..., RankPool], mode: str) -> None:
    def on_rank() -> None:
        with runtime():
            with pytest.raises(errors.InvalidArgumentError, match="do not divide"):
                call(mode, lambda x: ud.alltoall(x, name="a"), np.zeros(3))
            with pytest.raises(errors.InvalidArgumentError, match="rank"):
                call(mode, lambda x: ud.broadcast(x, 7, name="b"), np.zeros(3))
        with pytest.raises((errors.FailedPreconditionError, ValueError), match="init"):
            call(mode, lambda x: ud.allreduce(x, name="late"), np.zeros(3))

    pool(2, "shm").run(on_rank)


def test_a_function_runs_again_after_it_failed(pool: Callable[..., RankPool]) -> None:
    def on_rank() -> None:
        with runtime():

            @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
            def reduce(x: Any) -> Any:
                first = ud.allreduce(x, name="first")
                return first + ud.allreduce(x * 2, name="second")

            for _ in range(3):
                with pytest.raises(errors.FailedPreconditionError, match="shape"):
                    reduce(tf.zeros([2 + ud.rank()]))
                np.testing.assert_allclose(reduce(tf.ones([2])).numpy(), [3.0, 3.0])

            @tf.function
            def without_results() -> Any:
                ud.barrier()
                return ud.rank_op()

            assert int(without_results()) == ud.rank()

        @tf.function
        def late(x: Any) -> Any:
            return ud.allreduce(x, name="late")

        with runtime():
            late(tf.zeros([2]))
        with pytest.raises(errors.FailedPreconditionError, match="init"):
            late(tf.zeros([2]))

    pool(2, "shm").run(on_rank)
