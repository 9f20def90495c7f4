"""Things that belong to one context, such as communicators, held by objects that outlive it in an elastic job."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from unidist.runtime import context

T = TypeVar("T")


class OfContext(Generic[T]):
    """Something that belongs to a context, and is made again in each generation of an elastic job, when asked for.

    Args:
        make: makes it.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[weakref.ref[context.Context], T] | None = None

    def __call__(self) -> T:
        """Return that of the present context. Collective if to make it is."""
        runtime = context.current()
        if self._made is None or self._made[0]() is not runtime:
            self._made = (weakref.ref(runtime), self._make())
        return self._made[1]
