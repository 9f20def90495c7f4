"""Errors of host operations within compiled programs, of which JAX passes on no more than the text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

_failure: BaseException | None = None


def remember_failure(error: BaseException) -> None:
    """Keep the error that a host operation is about to end its program with; the first one, until it is taken."""
    global _failure
    _failure = _failure or error


def take_failure() -> BaseException | None:
    """Return the first error of a host operation since the last call, once."""
    global _failure
    failure, _failure = _failure, None
    return failure


@contextmanager
def translated() -> Iterator[None]:
    """Raise unidist's own error where a compiled program within the block fails in one of its operations.

    JAX raises `jax.errors.JaxRuntimeError`, whose text has the error in it, when the program is called or when its
    results are waited for, so wait within the block.
    """
    take_failure()
    try:
        yield
    except jax.errors.JaxRuntimeError as exc:
        failure = take_failure()
        if failure is None:
            raise
        raise failure from exc
