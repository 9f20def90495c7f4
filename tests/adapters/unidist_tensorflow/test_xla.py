"""Functions that XLA compiles refuse nodes of the host when they are traced, and say what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from unidist.errors import UsageError
from unidist_tensorflow.basics import size_op
from unidist_tensorflow.gradients.tensors import host_node
from unidist_tensorflow.operations import graph

ONE = tf.TensorSpec([], tf.float32)


def an_operation() -> Any:
    return graph.detached(lambda *_: pytest.fail("never run"), [], [ONE], name="loss")


def a_node() -> Any:
    return host_node(lambda: pytest.fail("never run"), [], [ONE], name="loss")


def a_number() -> Any:
    return size_op(name="loss")


def in_a_branch(add: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: tf.cond(tf.constant(True), add, add)


@pytest.mark.parametrize("add", [an_operation, a_node, a_number])
@pytest.mark.parametrize("wrap", [lambda add: add, tf.function, in_a_branch])
def test_nodes_of_the_host_are_refused_where_xla_compiles(add: Callable[[], Any], wrap: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=r"'loss' in a function with jit_compile=True: .* Leave jit_compile out"):
        tf.function(wrap(add), jit_compile=True, autograph=False).get_concrete_function()


def test_a_function_may_call_one_that_xla_compiles() -> None:
    double = tf.function(lambda value: 2 * value, jit_compile=True)

    def step() -> Any:
        double(tf.ones([]))
        return an_operation()

    assert tf.function(step, autograph=False).get_concrete_function()
