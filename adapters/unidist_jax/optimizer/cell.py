"""References from the operations of compiled programs, which are kept for ever, to objects that are to be released."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

from unidist.errors import UsageError
from unidist_jax.compiled import flush
from unidist_jax.jax_state import is_tracing

T_co = TypeVar("T_co", covariant=True)

_abandoned: list[Cell[Any]] = []
"""Those whose owners are no more. The collector may find that out on any thread, even on that of a program."""


class Cell(Generic[T_co]):
    """Refers to an object until its owner is gone and the programs that may use it have ended.

    Programs run after they were called, so an optimizer may be gone before the last one has run.

    Args:
        value: the object.
        owner: when nobody refers to it any more, the object may be released. It must not refer to this.
    """

    def __init__(self, value: T_co, owner: object) -> None:
        self._value: T_co | None = value
        weakref.finalize(owner, _abandoned.append, self).atexit = False

    @property
    def value(self) -> T_co:
        """The object; UsageError if it was released."""
        if self._value is None:
            raise UsageError(
                "a compiled function runs the update of an optimizer that is no more: keep the optimizer as long as "
                "what was compiled with it"
            )
        return self._value

    def release(self) -> None:
        """Drop the object."""
        self._value = None


def release_abandoned() -> None:
    """Release the objects whose owners are no more, when the programs that were called have ended."""
    if not _abandoned or is_tracing():
        return
    flush()
    while _abandoned:
        _abandoned.pop().release()
