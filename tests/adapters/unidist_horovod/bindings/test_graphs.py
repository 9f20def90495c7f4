"""Operations as graphs of their own, tried with TensorFlow's operations, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from horovod_bindings import ENVIRONMENTS

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.parallel


@pytest.fixture
def run(rank_pool: RankPoolFactory) -> Callable[..., Any]:
    """Return `run(case)`: the case in another process, which may import TensorFlow."""

    def run(case: Callable[[], Any]) -> Any:
        pool = rank_pool(1, env=ENVIRONMENTS["tensorflow"])
        return pool.run(case, timeout=timedelta(seconds=180))[0]

    return run


def test_names_are_allowed_ones_and_stay_different(run: Callable[..., Any]) -> None:
    def case() -> None:
        import numpy as np
        import tensorflow as tf

        from unidist_horovod.bindings.graphs import OperationGraph, node_name

        names = [
            "a@b",
            "a-40b",
            "a/b",
            "a//b/",
            "a b",
            "ä",
            "a~b",
            "a_b",
            "a.b",
            "a%b",
            "a\\b",
            "A",
            "a",
            "-",
            "_",
            "9",
        ]
        nodes = [node_name(name) for name in names]
        assert len(set(nodes)) == len(names)
        for node in nodes:
            graph = OperationGraph(lambda x, node=node: tf.raw_ops.Identity(input=x, name=node), [np.float32])
            (output,) = graph.run(np.ones(3, np.float32))
            assert output.tolist() == [1, 1, 1]
            assert graph._outputs[0].op.name == node
            graph.close()

    run(case)


def test_what_fails_is_told_in_the_words_of_the_operation(run: Callable[..., Any]) -> None:
    def case() -> None:
        import numpy as np
        import tensorflow as tf

        from unidist_horovod.bindings.graphs import OperationGraph
        from unidist_horovod.bindings.interface import OperationFailed

        graph = OperationGraph(lambda x: tf.raw_ops.CheckNumerics(tensor=x, message="Mismatched things"), [np.float64])
        assert graph.run(np.ones((2, 2)))[0].shape == (2, 2)
        with pytest.raises(OperationFailed) as caught:
            graph.run(np.full(3, np.nan))
        assert str(caught.value) == "Mismatched things : Tensor had NaN values"

    run(case)


def test_graphs_are_kept_for_their_names_and_bounded_in_number(run: Callable[..., Any]) -> None:
    def case() -> None:
        import numpy as np

        from unidist_horovod.bindings.graphs import GraphCache

        cache = GraphCache(max_kept=3)
        made = []

        def take(name: str) -> Any:
            def build(x: Any) -> Any:
                made.append(name)
                return x + 1

            return cache.take((name,), build, [np.int32])

        running = take("long")
        for name in ("a", "b", "c", "d"):
            graph = take(name)
            assert graph.run(np.zeros(1, np.int32))[0].tolist() == [1]
            cache.give_back(graph)
        assert len(cache._graphs) == 3
        for name in ("d", "c", "long"):  # the last one runs twice at a time
            cache.give_back(take(name))
        assert made == ["long", "a", "b", "c", "d", "long"]
        assert running.run(np.zeros(1, np.int32))[0].tolist() == [1]
        cache.give_back(running)
        cache.give_back(take("a"))
        assert made[-1] == "a"
        cache.clear()
        assert not cache._graphs

    run(case)


_ALL_THREADS_WAIT = """
import threading

import numpy as np
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)

from unidist_horovod.bindings.graphs import OperationGraph

def exchange(values):
    result = []
    graph = OperationGraph(lambda x: x * 2, [np.float32])
    thread = threading.Thread(target=lambda: result.extend(graph.run(values)), daemon=True)
    thread.start()
    thread.join(30)
    return result[0]

step = tf.function(lambda x: tf.numpy_function(exchange, [x], tf.float32))
print(step(tf.ones(3)).numpy().tolist(), tf.config.threading.get_intra_op_parallelism_threads())
"""


def test_an_operation_needs_none_of_tensorflows_threads() -> None:
    done = subprocess.run([sys.executable, "-c", _ALL_THREADS_WAIT], capture_output=True, text=True, timeout=90)
    assert done.stdout.strip() == "[2.0, 2.0, 2.0] 1", done.stderr
