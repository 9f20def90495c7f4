"""Tensors inside of arguments and results of a model: tuples, dicts, dataclasses and combinations of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


def map_tensors(change: Callable[[Any], Any], is_tensor: Callable[[object], bool], value: Any) -> Any:
    """Return a structure with every tensor in it changed; the structure keeps its types, and `value` stays as it is.

    Args:
        change: from a tensor to a tensor; the same object where nothing changes.
        is_tensor: recognises a tensor.
        value: a tensor, or tuples, named tuples, lists, mappings and dataclasses of such; others are returned as they
            are.
    """
    if is_tensor(value):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(change, is_tensor, item) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        if type(value) is dict:
            return changed
        made: Any = copy.copy(value)  # of whatever class: an ordered dict, a model's output with attributes
        for key, item in changed.items():
            made[key] = item
        return made
    if isinstance(value, tuple | list):
        items = [map_tensors(change, is_tensor, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: map_tensors(change, is_tensor, getattr(value, field.name))
            for field in dataclasses.fields(value)
            if hasattr(value, field.name)
        }
        if all(item is getattr(value, name) for name, item in changed.items()):
            return value
        made = copy.copy(value)
        for name, item in changed.items():
            object.__setattr__(made, name, item)  # also where it is frozen
        return made
    return value
