"""Errors of host operations within compiled programs, of which JAX passes on no more than the text."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from unidist.negotiation.process_sets import global_process_set
from unidist.runtime import context
from unidist_arrays.operations import prepare_barrier

_failures: deque[tuple[str, BaseException]] = deque(maxlen=8)
"""The last ones, with the texts that their programs end with. A program may have failed long before anybody asks."""
_not_raised: list[BaseException] = []
"""The first one that nobody has seen."""


def remember_failure(error: BaseException) -> str:
    """Keep the error that a host operation ends its program with, and return the text to end it with."""
    text = f"{type(error).__name__}: {error}"
    if error.__traceback__ is not None:
        traceback.clear_frames(error.__traceback__)  # they refer to memory of the program
    _failures.append((text, error))
    if not _not_raised:
        _not_raised.append(error)
    return text


def take_failure() -> BaseException | None:
    """Return the first error that has ended a program, unless `translated` has raised it, and forget it.

    For callers that do not wait for the results of programs themselves.
    """
    return _not_raised.pop() if _not_raised else None


@contextmanager
def translated() -> Iterator[None]:
    """Raise unidist's own error where a compiled program within the block fails in one of its operations.

    JAX raises an error whose text has ours in it, when the program is called or when its results are waited for, so
    wait within the block. It is `jax.errors.JaxRuntimeError`, or ValueError from programs that it has called before.
    A collective of XLA that has failed because a rank is gone is a PeerLostError, too.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as exc:
        failure = _failure_of(str(exc))
        if failure is None:
            if "Gloo" in str(exc) and context.is_initialized():  # a collective of XLA on CPUs, which does not say who
                prepare_barrier([], "after a collective of XLA has failed", process_set=global_process_set).wait()
            raise
        _not_raised.clear()
        raise failure from exc


def _failure_of(text: str) -> BaseException | None:
    """Return the last error whose text is in that of JAX."""
    return next((failure for own, failure in reversed(_failures) if own in text), None)
