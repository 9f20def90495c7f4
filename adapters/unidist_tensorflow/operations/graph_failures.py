"""Errors of Python functions in a graph, as the errors of TensorFlow that Horovod raises.

TensorFlow makes an error of whatever a Python function raises, by its class: InvalidArgumentError of a ValueError,
UnimplementedError of a NotImplementedError, UnknownError of nearly everything else, its own errors included. So none
comes out as a FailedPreconditionError, by which scripts for Horovod know a mismatch. Such an error is not raised, but
returned, as two more results of the function; a node behind it fails with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from unidist.errors import MismatchError, NotInitializedError, UsageError

FAILURE = (tf.string, tf.int64)
"""The element types of what `failure_of` and `no_failure` return, each `(2,)`."""


def no_failure() -> tuple[Any, Any]:
    """Return the inputs with which `fail_if_told` does nothing."""
    return _NO_MESSAGE, _EQUAL


def failure_of(error: Exception) -> tuple[Any, Any]:
    """Return the inputs with which `fail_if_told` fails with the text of this error, a failed precondition.

    Raises:
        ValueError: of another misuse; an InvalidArgumentError to TensorFlow.
        Exception: the error itself, which TensorFlow makes the right one of.
    """
    if isinstance(error, MismatchError | NotInitializedError):
        return np.array([str(error).encode()] * 2, object), _DIFFERENT
    if isinstance(error, UsageError) and not isinstance(error, ValueError):
        raise ValueError(str(error)) from error
    raise error


def fail_if_told(message: tf.Tensor, has_failed: tf.Tensor) -> tf.Operation:
    """Add a node that fails with FailedPreconditionError and the message, unless it is told `no_failure`.

    A hash table that is given two values for one key does that, and names the key. It is the one operation of
    TensorFlow that fails so with a text that is known when the graph runs.
    """
    table = tf.raw_ops.AnonymousHashTable(key_dtype=tf.string, value_dtype=tf.int64)
    return tf.raw_ops.InitializeTableV2(table_handle=table, keys=message, values=has_failed)


_NO_MESSAGE = np.array([b"", b""], object)
_EQUAL, _DIFFERENT = np.array([0, 0], np.int64), np.array([0, 1], np.int64)
