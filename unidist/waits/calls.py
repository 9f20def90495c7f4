"""Labels for the calls in which a thread of this process may wait: "optimizer.state_dict()", as the script says it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from unidist.observation import Call, stacks

__all__ = ["calling", "is_blocked"]

P = ParamSpec("P")
R = TypeVar("R")


def is_blocked() -> bool:
    """Return whether a thread of this process is in a call, in which it may wait for other ranks."""
    return any(isinstance(each, Call) for calls in list(stacks.values()) for each in list(calls))


class calling:  # noqa: N801 - reads as a statement
    """Name, in the script's words, the call during which this thread may wait for other ranks.

    For deadlock reports: `with calling("optimizer.state_dict()"): ...`, or as a decorator. Costs half a microsecond.
    Nested ones are all reported, the outermost first.

    Args:
        label: the call as the script writes it, or the part of the model ("gather of layers.3").
    """

    __slots__ = ("_label", "_stack")

    def __init__(self, label: str) -> None:
        self._label = label

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: each call of it is named."""
        label = self._label

        @functools.wraps(function)
        def named(*args: P.args, **kwargs: P.kwargs) -> R:
            with calling(label):
                return function(*args, **kwargs)

        return named

    def __enter__(self) -> Self:
        self._stack = stacks[get_ident()]
        self._stack.append(self._label)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.pop()
