"""Operations in programs that take structures of values apart, and put them together."""

from __future__ import annotations

from typing import Any

from unidist_pipeline._torch.tracing.program import Free
from unidist_pipeline._torch.tracing.values import changed, tensors_in


class Constant(Free):
    """A constant of the model's code, or operations within an operation."""

    def __init__(self, value: Any) -> None:
        self.__name__ = "held"
        self._value = value

    def __call__(self) -> Any:
        """Return it."""
        return self._value


class ArgumentTensor(Free):
    """One tensor of an argument."""

    def __init__(self, place: int) -> None:
        self.__name__ = "part"
        self._place = place

    def __call__(self, argument: Any) -> Any:
        """Return it."""
        return tensors_in(argument)[self._place]


class Assembly:
    """Builds a structure, of the classes that the model's code has made, from values that are computed.

    Args:
        structure: with an `ValueIndex` in the place of each of these values.
    """

    def __init__(self, structure: Any) -> None:
        self.__name__ = "whole"
        self._structure = structure

    def __call__(self, *parts: Any) -> Any:
        """Return it."""
        return changed(lambda item: parts[item.number] if isinstance(item, ValueIndex) else item, self._structure)


class ValueIndex:
    """Stands for one of several values. It is no dataclass, which would be a structure itself."""

    def __init__(self, number: int) -> None:
        self.number = number
