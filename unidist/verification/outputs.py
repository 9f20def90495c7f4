"""Two values that a model returned, compared: their structure, and the numbers in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_TOLERANCES = {"float64": 1e-8, "complex128": 1e-8, "float32": 1e-3, "complex64": 1e-3}
_COARSE = 0.1
"""For 16-bit numbers, as a part of the largest absolute value."""


@dataclass(frozen=True)
class Leaf:
    """One tensor of what a model returned.

    Args:
        shape: of the tensor.
        dtype: name of its element type.
        values: in a type that numpy has; None: only the shape and type are known.
    """

    shape: tuple[int, ...]
    dtype: str
    values: np.ndarray[Any, Any] | None


ToLeaf = Callable[[Any], Leaf | None]
"""Returns a tensor as a `Leaf`; None for what is no tensor."""


def difference(
    expected: Any,
    found: Any,
    to_leaf: ToLeaf,
    *,
    coarse: bool = False,
    parts: bool = False,
    path: str = "the output",
) -> str:
    """Return where two nested values differ first, or "".

    Args:
        expected: of the unchanged model: tensors in mappings, sequences and dataclasses.
        found: of the changed one.
        to_leaf: see `ToLeaf`.
        coarse: the changed model computes in a type of 16 bits: types may differ, and numbers by more.
        parts: tensors of another shape are parts of the expected ones, and are not compared.
        path: of the values, for the message.
    """
    one, other = to_leaf(expected), to_leaf(found)
    if one is not None and other is not None:
        if parts and one.shape != other.shape:
            return ""
        return _difference_of_leaves(one, other, coarse, path)
    if (one is None) is not (other is None) or type(expected) is not type(found):
        return f"{path} is {_kind(found)} and not {_kind(expected)}"
    items, others = _items(expected), _items(found)
    if items.keys() != others.keys():
        return f"{path} has {', '.join(others) or 'nothing'} and not {', '.join(items) or 'nothing'}"
    texts = (
        difference(item, others[name], to_leaf, coarse=coarse, parts=parts, path=f"{path}{name}")
        for name, item in items.items()
    )
    return next((text for text in texts if text), "")


def _items(value: Any) -> dict[str, Any]:
    """Return what a structure consists of, by the expression that leads to it; nothing for other values."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]": each for key, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f".{field.name}": getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return {f"[{index}]": each for index, each in enumerate(value)}
    return {}


def _difference_of_leaves(expected: Leaf, found: Leaf, coarse: bool, path: str) -> str:
    if expected.shape != found.shape:
        return f"{path} has the shape {list(found.shape)} and not {list(expected.shape)}"
    if expected.dtype != found.dtype and not coarse:
        return f"{path} has elements of {found.dtype} and not of {expected.dtype}"
    if expected.values is None or found.values is None or not expected.values.size:
        return ""
    one, other = np.asarray(expected.values), np.asarray(found.values)
    if one.dtype.kind not in "fc":
        return "" if np.array_equal(one, other) else f"{path} has other values"
    with np.errstate(invalid="ignore"):
        distance = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0.0, np.abs(one - other))
    finite = np.abs(one[np.isfinite(one)])
    tolerance = _COARSE if coarse else _TOLERANCES.get(expected.dtype, _COARSE)
    if np.max(distance) <= tolerance * max(float(finite.max(initial=0.0)), 1e-6):
        return ""
    place = np.unravel_index(int(np.argmax(distance)), distance.shape)
    index = f"[{', '.join(map(str, place))}]" if place else ""
    return f"{path}{index} is {other[place]:.6g} and not {one[place]:.6g}"


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
