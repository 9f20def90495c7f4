"""Two nested values compared: which difference is found, and how it is named."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest

from unidist.verification import Leaf, difference


@dataclasses.dataclass
class _Output:
    logits: Any
    cache: Any = None


class _Pair(NamedTuple):
    first: Any
    second: Any


def _leaf(value: Any) -> Leaf | None:
    return Leaf(value.shape, value.dtype.name, value) if isinstance(value, np.ndarray) else None


_ONE = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    ("expected", "found", "said"),
    [
        (_ONE, _ONE.copy(), ""),
        (_ONE, _ONE * (1 + 1e-5), ""),
        (_ONE, _ONE + np.eye(2, 3, dtype=np.float32), "the output[0, 0] is 1 and not 0"),
        (_ONE, _ONE[:1], "the output has the shape [1, 3] and not [2, 3]"),
        (_ONE, _ONE.astype(np.float64), "the output has elements of float64 and not of float32"),
        (_ONE, (_ONE,), "the output is a tuple and not a ndarray"),
        ({"logits": _ONE}, OrderedDict(logits=_ONE), "the output is a OrderedDict and not a dict"),
        ({"logits": _ONE}, {"other": _ONE}, "the output has ['other'] and not ['logits']"),
        ([_ONE], [_ONE, _ONE], "the output has [0], [1] and not [0]"),
        (_Output(_ONE), _Output(_ONE * 2), "the output.logits[1, 2] is 2 and not 1"),
        (_Output(_ONE, [_ONE]), _Output(_ONE, [_ONE * 2]), "the output.cache[0][1, 2] is 2 and not 1"),
        (_Pair(_ONE, 3), _Pair(_ONE, None), "the output[1] is a NoneType and not a int"),
        (np.arange(3), np.array([0, 1, 3]), "the output has other values"),
        (np.full(3, np.nan), np.full(3, np.nan), ""),
        (np.full(3, np.nan), np.zeros(3), "the output[0] is 0 and not nan"),
        (np.array(np.inf), np.array(np.inf), ""),
        (np.zeros((0, 3)), np.zeros((0, 3)), ""),
    ],
)
def test_the_first_difference_is_named(expected: Any, found: Any, said: str) -> None:
    assert difference(expected, found, _leaf) == said


def test_sixteen_bits_may_differ_more_and_in_type() -> None:
    rounded = _ONE.astype(np.float16)
    assert difference(_ONE, rounded * np.float16(1.05), _leaf, coarse=True) == ""
    assert difference(_ONE, rounded * np.float16(1.5), _leaf, coarse=True)


def test_without_values_shapes_and_types_are_compared() -> None:
    known, unknown = Leaf((2, 3), "float32", _ONE), Leaf((2, 3), "float32", None)
    assert difference(unknown, known, lambda value: value) == ""
    assert difference(Leaf((3,), "float32", None), known, lambda value: value)
