"""Variables with the paths of others: optimizers and their exclusions go by the path of a variable."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras

__all__ = ["variable_at"]


def variable_at(path: str, value: Any, dtype: str) -> Any:
    """Return a new variable with this path, whatever scope is open.

    Args:
        path: with slashes.
        value: what it holds.
        dtype: Keras' name of its type.
    """
    parent, _, name = path.rpartition("/")
    with _at(parent):
        return keras.Variable(value, dtype=dtype, name=name)


def _at(parent: str) -> AbstractContextManager[Any]:
    if not parent:
        return nullcontext()
    above, _, name = parent.rpartition("/")
    scope: AbstractContextManager[Any] = keras.name_scope(name, override_parent=above)
    return scope
