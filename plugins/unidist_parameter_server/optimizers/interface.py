"""The rule by which a store changes parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

Array = np.ndarray[Any, np.dtype[Any]]

NativeForm = tuple[str, tuple[float, ...]]
"""A kernel's name, as in `native/rules.c`, and its numbers, in the order of the fields of the rule."""


@dataclass(frozen=True)
class FlatStep:
    """The memory of one step: 1-dimensional arrays of the same length and floating-point type.

    Args:
        values: of the parameters before.
        new_values: where those after it go: the memory of `values` itself, or memory that does not overlap with it.
        change: what was pushed: a gradient or a difference. Not changed.
        slots: the optimizer's state before, one array for each of `Rule.slots`.
        new_slots: where the state after it goes, likewise: the memory of `slots`, or other memory.
        count: number of this update of these parameters, from 1.
        factor: of the learning rate, or of the difference.
        scratch: two arrays for intermediate results.
    """

    values: Array
    new_values: Array
    change: Array
    slots: Sequence[Array]
    new_slots: Sequence[Array]
    count: int
    factor: float
    scratch: tuple[Array, Array]


class Rule(ABC):
    """An optimizer with its options, or the addition of a difference. Compared by value.

    Attributes:
        slots: names of the arrays that it keeps for each parameter, of the parameter's shape. Zeros at first, unless
            `first_value` says otherwise.
    """

    slots: ClassVar[tuple[str, ...]] = ()

    @property
    def first_value(self) -> float:
        """The value of every element of the slots before the first update."""
        return 0.0

    @property
    def local_rate(self) -> float:
        """The rate of a worker's plain gradient steps between two fetches (Downpour SGD)."""
        return 0.0

    def native_form(self) -> NativeForm | None:
        """Return the kernel in C that does what `apply` does, and its numbers; None: there is none.

        Stores ask for it at each push. A subclass of a rule that has one inherits none: it may have another `apply`.
        """
        return None

    @abstractmethod
    def apply(self, step: FlatStep) -> None:
        """Write the new values and slots, all of them. Where they are in the memory of the old ones, those are lost."""


@dataclass(frozen=True)
class AddDifference(Rule):
    """Adds the difference that a worker's own optimizer has made, as BytePS does without synchronization."""

    @override
    def native_form(self) -> NativeForm | None:
        return ("add", ()) if type(self) is AddDifference else None

    @override
    def apply(self, step: FlatStep) -> None:
        scaled = _times(step.change, step.factor, step.scratch[0])
        np.add(step.values, scaled, out=step.new_values)


def descend(step: FlatStep, direction: Array, rate: float) -> None:
    """Write `values - rate * direction`; `direction` may be the second of the scratch arrays."""
    np.multiply(direction, -rate, out=step.scratch[1])
    np.add(step.values, step.scratch[1], out=step.new_values)


def decayed(step: FlatStep, weight_decay: float) -> Array:
    """Return the gradient with `weight_decay * values` added, in the first of the scratch arrays if that changes it."""
    if not weight_decay:
        return step.change
    np.multiply(step.values, weight_decay, out=step.scratch[0])
    np.add(step.scratch[0], step.change, out=step.scratch[0])
    return step.scratch[0]


def _times(values: Array, factor: float, scratch: Array) -> Array:
    return values if factor == 1.0 else np.multiply(values, factor, out=scratch)
