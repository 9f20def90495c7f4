"""Variables of other ranks' stages: their memory is freed, and reading their values is an error."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NoReturn

from unidist.errors import UsageError
from unidist.mixins import with_mixin


class ReleasedMixin:
    """Methods that a released variable overrides. Never instantiated."""

    path: str

    @property
    def value(self) -> NoReturn:
        """Refuse: the values are on another rank."""
        raise UsageError(
            f"{self.path!r} belongs to a stage of another rank of the pipeline, and this rank has given its memory "
            "back. Use the model that distribute or TrainStep returned, and unidist's save and load for checkpoints"
        )

    def assign(self, value: Any) -> None:
        """Refuse: the values are on another rank."""
        self.value  # noqa: B018 - it raises


def release(variables: Iterable[Any]) -> None:
    """Free the memory of Keras variables; layers still know their shapes and names."""
    for variable in variables:
        kind: Any = type(variable)
        variable.__class__ = _released(kind)
        variable._value = None


@functools.cache
def _released(plain: Any) -> type[Any]:
    return with_mixin(plain, ReleasedMixin)
