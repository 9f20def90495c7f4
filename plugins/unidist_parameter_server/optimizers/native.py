"""Rules in C, where the extension was built and has them. Else the numpy code of the rules is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unidist_parameter_server.native import IS_BUILT, library
from unidist_parameter_server.optimizers.interface import FlatStep, Rule

Array = np.ndarray[Any, np.dtype[Any]]

TYPES = {"float32": 0, "float64": 1}
"""Numbers of the element types in C."""

_NEEDED_SLOTS = {"adagrad": 1, "adam": 2}


class NativeRules:
    """Rules as the extension takes them.

    Args:
        table: one row for each different rule.
        numbers: for each parameter, the row of its rule.
    """

    def __init__(self, table: Array, numbers: Array) -> None:
        self.table = table
        self.numbers = numbers


def native_rules(rules: Sequence[Rule], num_slots: int) -> NativeRules | None:
    """Return rules, one for each parameter, for the extension; None if there is none, or one of them is not in it.

    Args:
        rules: neighbours are often the same object.
        num_slots: arrays that the store keeps for each parameter.
    """
    if not IS_BUILT:
        return None
    rows: list[tuple[float, ...]] = []
    known: dict[int, int] = {}
    numbers = np.empty(len(rules), np.int32)
    for index, rule in enumerate(rules):
        number = known.get(id(rule))
        if number is None:
            row = _row(rule, num_slots)
            if row is None:
                return None
            number = known[id(rule)] = len(rows)
            rows.append(row)
        numbers[index] = number
    return NativeRules(np.array(rows, np.float64), numbers)


def apply_native(rule: Rule, step: FlatStep) -> bool:
    """Apply a rule in C if that has it, and the step is in place; return whether it was applied."""
    if not IS_BUILT or step.new_values is not step.values or step.new_slots is not step.slots:
        return False
    row = _row(rule, len(step.slots))
    arrays = (step.values, step.change, *step.slots)
    if row is None or len(step.slots) > library.MAX_SLOTS or not all(each.flags.c_contiguous for each in arrays):
        return False
    table = np.array(row, np.float64)
    slots = [slot.ctypes.data for slot in step.slots] + [0] * library.MAX_SLOTS
    library.apply(
        table.ctypes.data,
        TYPES[step.values.dtype.name],
        step.values.ctypes.data,
        step.change.ctypes.data,
        slots[0],
        slots[1],
        len(step.slots),
        len(step.values),
        step.count,
        step.factor,
    )
    return True


def _row(rule: Rule, num_slots: int) -> tuple[float, ...] | None:
    form = rule.native_form()
    if form is None or num_slots < _NEEDED_SLOTS.get(form[0], 0):
        return None
    kind, num_options = library.KINDS[form[0]]
    assert len(form[1]) == num_options, f"{form[0]} has {num_options} numbers in C"
    return (float(kind), *form[1], *[0.0] * (library.NUM_OPTIONS - num_options))
