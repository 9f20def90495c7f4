"""Operations of graphs never hang for the order in which TensorFlow runs them: the pools have one inter-op thread."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from _modes import call, runtime

import unidist.tensorflow as ud
from unidist.jobs.pool.pool import RankPool

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel
GRAPHS = ("function", "session")


@pytest.mark.parametrize("mode", GRAPHS)
@pytest.mark.parametrize("size", [2, 3])
def test_opposite_program_orders(pool: Pool, mode: str, size: int) -> None:
    def on_rank() -> None:
        with runtime():
            assert tf.config.threading.get_inter_op_parallelism_threads() in (0, 1)  # 0: as the environment says
            order = list(range(12))
            np.random.default_rng(ud.rank()).shuffle(order)

            def body(x: tf.Tensor) -> list[tf.Tensor]:
                results = {index: ud.allreduce(x * index, op=ud.Sum, name=f"item{index}") for index in order}
                gathered = {index: ud.allgather(x[:1] + index, name=f"rows{index}") for index in reversed(order)}
                return [results[index] for index in range(12)] + [gathered[index] for index in range(12)]

            found = call(mode, body, np.ones(3, np.float32))
            for index in range(12):
                np.testing.assert_array_equal(found[index], np.full(3, index * size, np.float32))
                np.testing.assert_array_equal(found[12 + index], np.full(size, 1 + index, np.float32))

    pool(size, "shm").run(on_rank)


def test_repeated_runs_in_opposite_orders(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():

            @tf.function
            def body(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                if ud.rank():
                    b = ud.allreduce(x + 1, name="b", op=ud.Sum)
                    a = ud.allreduce(x, name="a", op=ud.Sum)
                else:
                    a = ud.allreduce(x, name="a", op=ud.Sum)
                    b = ud.allreduce(x + 1, name="b", op=ud.Sum)
                return a, ud.allreduce(a + b, name="c", op=ud.Sum)

            for step in range(50):
                a, c = body(tf.constant([float(step)]))
                assert a.numpy() == [2 * step]
                assert c.numpy() == [2 * (2 * step + 2 * (step + 1))]

    pool(2, "shm").run(on_rank)


def test_dependent_operations_beside_independent_ones(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():

            def body(x: tf.Tensor) -> list[tf.Tensor]:
                chains = {}
                for chain in range(4) if ud.rank() else reversed(range(4)):
                    value = x + chain
                    for link in range(3):
                        value = ud.allreduce(value, name=f"{chain}.{link}")
                    chains[chain] = value
                return [chains[chain] for chain in range(4)]

            for mode in GRAPHS:
                found = call(mode, body, np.array([float(ud.rank())]))
                assert [value.tolist() for value in found] == [[0.5 + chain] for chain in range(4)]

    pool(2, "shm").run(on_rank)


def test_a_function_that_is_called_twice_matches_call_by_call(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():

            @tf.function
            def inner(x: tf.Tensor) -> tf.Tensor:
                return ud.allreduce(x, op=ud.Sum)

            @tf.function
            def outer(x: tf.Tensor) -> list[tf.Tensor]:
                return [inner(x), inner(10 * x), inner(100 * x)]

            for step in range(30):
                found = [value.numpy().item() for value in outer(tf.constant([float(step)]))]
                assert found == [2.0 * step, 20.0 * step, 200.0 * step]

    pool(2, "shm").run(on_rank)


def test_loops_and_branches(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():

            @tf.function
            def looped(steps: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                total = tf.constant(0.0)
                history = tf.TensorArray(tf.float32, 0, dynamic_size=True)
                for step in tf.range(steps):
                    # Does not depend on the iteration before: TensorFlow may run iterations side by side.
                    value = ud.allreduce(tf.cast(step, tf.float32) + float(ud.rank()), op=ud.Sum)
                    history = history.write(step, value)
                    if step % 2 == 0:
                        total += ud.allreduce(value, op=ud.Sum)
                return total, history.stack()

            total, history = looped(tf.constant(20))
            assert history.numpy().tolist() == [2.0 * step + 1 for step in range(20)]
            assert total.numpy() == sum(2 * (2.0 * step + 1) for step in range(0, 20, 2))

    pool(2, "shm").run(on_rank)


def test_the_same_names_after_another_trace(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():

            @tf.function
            def body(x: tf.Tensor) -> tf.Tensor:
                return ud.allreduce(x, op=ud.Sum)

            if ud.rank() == 0:  # tensors that the other rank does not make, and so other running numbers
                for _ in range(7):
                    tf.constant(1.0)
            for rows in (1, 2, 3, 2, 1):
                assert body(tf.ones(rows)).numpy().tolist() == [2.0] * rows
            captured = tf.ones(500)

            @tf.function
            def capturing() -> tf.Tensor:
                return ud.allreduce(captured, op=ud.Sum)

            assert capturing().numpy().tolist() == [2.0] * 500

    pool(2, "shm").run(on_rank)


def test_many_operations_in_a_session(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime(), tf.Graph().as_default():
            order = list(range(40))
            if ud.rank():
                order.reverse()
            variables = {i: tf.compat.v1.get_variable(f"v{i}", initializer=float(i + 100 * ud.rank())) for i in order}
            update = [variables[i].assign(ud.broadcast(variables[i], 1, name=f"b{i}")) for i in order]
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                session.run(update)
                assert session.run([variables[i] for i in range(40)]) == [i + 100.0 for i in range(40)]

    pool(2, "shm").run(on_rank)
