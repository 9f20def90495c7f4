"""Nodes of the host in the graph of a `tf.function`: their order holds whatever TensorFlow makes of the graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

from part_pools import PartPools

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return tensorflow_pools


def _node(number: int, calls: list[int]) -> Any:
    import tensorflow as tf

    from unidist_tensorflow.gradients import host_node

    def run() -> list[Any]:
        calls.append(number)
        return [np.asarray(float(number))]

    return host_node(run, [], [tf.TensorSpec([], tf.float64)], name=f"node_{number}")[0]


def _in_sequence() -> tuple[list[list[str]], list[int]]:
    """Return the nodes from which each node of a function has data, in order, and the order in which they ran."""
    import tensorflow as tf

    calls: list[int] = []
    traced = tf.function(lambda: [_node(number, calls) for number in range(3)], autograph=False)
    nodes = [each for each in traced.get_concrete_function().graph.get_operations() if each.type == "PyFunc"]
    traced()
    return [[tensor.op.name for tensor in each.inputs] for each in nodes], calls


def _in_branches_and_loops() -> tuple[float, list[int]]:
    """Return a sum of the nodes' results, and the order in which they ran."""
    import tensorflow as tf

    calls: list[int] = []

    def branches(flag: Any) -> Any:
        first = _node(0, calls)
        inner = tf.cond(flag, lambda: _node(1, calls) + _node(2, calls), lambda: _node(3, calls))
        *_, looped = tf.while_loop(
            lambda turn, _: turn < 2, lambda turn, total: (turn + 1, total + _node(4, calls)), (0, first)
        )
        return inner + looped + _node(5, calls)

    return float(tf.function(branches, autograph=False)(tf.constant(True))), calls


def _in_a_session() -> list[int]:
    """Return which of two nodes run in a session that is asked for the second."""
    import tensorflow as tf

    calls: list[int] = []
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        _, second = _node(0, calls), _node(1, calls)
        session.run(second)
    return calls


def test_each_node_has_data_of_the_one_before(tensorflow_pools: PartPools) -> None:
    [found] = tensorflow_pools.get(1).run(_in_sequence)
    assert found == ([[], ["node_0"], ["node_1"]], [0, 1, 2])


def test_branches_and_loops_have_their_own_order(tensorflow_pools: PartPools) -> None:
    [found] = tensorflow_pools.get(1).run(_in_branches_and_loops)
    assert found == (1 + 2 + 2 * 4 + 5, [0, 1, 2, 4, 4, 5])


def test_a_session_runs_only_what_it_is_asked_for(tensorflow_pools: PartPools) -> None:
    assert tensorflow_pools.get(1).run(_in_a_session) == [[1]]
