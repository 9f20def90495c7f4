"""The three ways in which TensorFlow runs operations; imported by the ranks of a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

import unidist.tensorflow as ud

MODES = ("eager", "function", "session")


@contextmanager
def runtime() -> Iterator[None]:
    """A fresh runtime around a test's work."""
    ud.init()
    try:
        yield
    finally:
        ud.shutdown()


def call(mode: str, function: Callable[..., Any], *inputs: Any) -> Any:
    """Return `function(*inputs)` as numpy arrays, the inputs given to it as tensors.

    Args:
        mode: one of `MODES`.
        function: of tensors, returns tensors in any structure.
        inputs: numpy arrays.
    """
    if mode == "eager":
        results = function(*(tf.constant(value) for value in inputs))
    elif mode == "function":
        results = tf.function(function)(*(tf.constant(value) for value in inputs))
    else:
        return in_session(function, *inputs)
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), results)


def in_session(function: Callable[..., Any], *inputs: Any) -> Any:
    """Run the function's results in a TF1 graph with a session."""
    with tf.Graph().as_default():
        placeholders = [tf.compat.v1.placeholder(value.dtype, value.shape) for value in map(np.asarray, inputs)]
        results = function(*placeholders)
        with tf.compat.v1.Session() as session:
            return session.run(results, dict(zip(placeholders, inputs, strict=True)))
