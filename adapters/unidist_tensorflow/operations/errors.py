"""Errors of operations in eager mode, which are unidist's and TensorFlow's at once, as Horovod raises them.

`except MismatchError` and `except tf.errors.FailedPreconditionError` both catch a mismatch. Inside of graphs the
error is TensorFlow's alone, of the same kind as here, with our text: `graph_failures`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from unidist.errors import (
    DeadlockError,
    DuplicateNameError,
    MismatchError,
    NotInitializedError,
    OperationError,
    PeerLostError,
    StalledError,
    UnidistError,
    UsageError,
)


class _OpError:
    """Mixed into the classes below: an error of two families, made from the text of the original.

    Keras makes an error that leaves a layer's call again, with more text, from the arguments of TensorFlow's errors.
    """

    def __init__(
        self, original: Any, op: Any = None, message: str | None = None, error_code: int | None = None
    ) -> None:
        node = None if isinstance(original, UnidistError) else original
        text = str(original) if message is None else message
        tf.errors.OpError.__init__(self, node, op, text, self.tensorflow_code if error_code is None else error_code)
        self.ranks = getattr(original, "ranks", ())

    tensorflow_code: int

    def __str__(self) -> str:
        return str(self.message)  # type: ignore[attr-defined]  # of OpError

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as unidist's error alone, which does not need TensorFlow."""
        for kind in type(self).__mro__:
            if kind.__module__ == UnidistError.__module__:
                return kind, (str(self),)
        raise AssertionError(f"{type(self)} is no UnidistError")


class MismatchOpError(_OpError, MismatchError, tf.errors.FailedPreconditionError):
    """A mismatch of the ranks' operations, as FailedPreconditionError."""

    tensorflow_code = tf.errors.FAILED_PRECONDITION


class DeadlockOpError(_OpError, DeadlockError, tf.errors.FailedPreconditionError):
    """A deadlock of the ranks, as FailedPreconditionError."""

    tensorflow_code = tf.errors.FAILED_PRECONDITION


class NotInitializedOpError(_OpError, NotInitializedError, tf.errors.FailedPreconditionError):
    """A call before `init()`, as FailedPreconditionError."""

    tensorflow_code = tf.errors.FAILED_PRECONDITION


class DuplicateNameOpError(_OpError, DuplicateNameError, tf.errors.InvalidArgumentError):
    """A name that is in use, as InvalidArgumentError."""

    tensorflow_code = tf.errors.INVALID_ARGUMENT


class OperationOpError(_OpError, OperationError, tf.errors.InvalidArgumentError):
    """Arguments that an operation cannot carry out, as InvalidArgumentError."""

    tensorflow_code = tf.errors.INVALID_ARGUMENT


class UsageOpError(_OpError, UsageError, tf.errors.InvalidArgumentError):
    """A wrong call, as InvalidArgumentError."""

    tensorflow_code = tf.errors.INVALID_ARGUMENT


class StalledOpError(_OpError, StalledError, tf.errors.UnknownError):
    """A wait that took too long, as UnknownError."""

    tensorflow_code = tf.errors.UNKNOWN


class PeerLostOpError(_OpError, PeerLostError, tf.errors.UnknownError):
    """The loss of a peer, as UnknownError."""

    tensorflow_code = tf.errors.UNKNOWN


_KINDS: tuple[tuple[type[UnidistError], type[_OpError]], ...] = (
    (DeadlockError, DeadlockOpError),
    (MismatchError, MismatchOpError),
    (NotInitializedError, NotInitializedOpError),
    (DuplicateNameError, DuplicateNameOpError),
    (OperationError, OperationOpError),
    (UsageError, UsageOpError),
    (StalledError, StalledOpError),
    (PeerLostError, PeerLostOpError),
)


@contextmanager
def as_op_errors() -> Iterator[None]:
    """Raise the errors of an eager operation as TensorFlow's too."""
    try:
        yield
    except tf.errors.OpError:
        raise
    except UnidistError as exc:
        for kind, made in _KINDS:
            if isinstance(exc, kind):
                error: Any = made(exc)
                raise error from exc
        raise
