"""What a Keras optimizer keeps for its variables. All of unidist reads it here."""

from __future__ import annotations

from typing import Any

__all__ = ["slot_lists", "variable_and_slots"]


def slot_lists(optimizer: Any) -> dict[str, list[Any]]:
    """Return the slots of an optimizer of Keras 3: a list by attribute, in the order of its variables.

    An element is None for a variable without this slot.
    """
    count = len(optimizer._trainable_variables)
    own = {id(each) for each in optimizer.variables}
    return {
        name: kept
        for name, kept in vars(optimizer).items()
        if isinstance(kept, list)
        and len(kept) == count
        and any(id(each) in own for each in kept)
        and all(each is None or id(each) in own for each in kept)
        and name not in ("_variables", "_trainable_variables")
    }


def variable_and_slots(optimizer: Any, variable: Any) -> list[Any]:
    """Return a variable, and its slots in an optimizer of Keras 3: momentum and the like.

    Moving averages are left out: they are of the variable, whether it has a gradient or not.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    index = optimizer._get_variable_index(variable)
    lists = [kept for name, kept in slot_lists(optimizer).items() if name != "_model_variables_moving_average"]
    return [variable, *(kept[index] for kept in lists if kept[index] is not None)]
