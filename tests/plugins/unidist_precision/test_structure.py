"""Tensors are found in whatever a model returns, and the structure keeps its types."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest

from unidist_precision._structure import map_tensors

Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True)
class Output:
    logits: Any
    hidden: Any = None
    note: str = "kept"
    computed: Any = field(init=False, default=None)


class Attributed(OrderedDict[str, Any]):
    """A mapping with attributes, as outputs of some libraries are."""


def doubled(value: Any) -> Any:
    return map_tensors(lambda number: 2.0 * number, lambda each: isinstance(each, float), value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.5, 3.0),
        ((1.0, "a", [2.0]), (2.0, "a", [4.0])),
        (Pair(1.0, None), Pair(2.0, None)),
        ({"a": 1.0, "b": {"c": (1.0,)}}, {"a": 2.0, "b": {"c": (2.0,)}}),
        (Output(1.0, (2.0,)), Output(2.0, (4.0,))),
        (None, None),
    ],
)
def test_every_tensor_is_changed_and_nothing_else(value: Any, expected: Any) -> None:
    found = doubled(value)
    assert found == expected
    assert type(found) is type(value)


def test_what_was_given_stays_as_it_is() -> None:
    value = Attributed(a=1.0, b="x")
    found = doubled(value)
    assert type(found) is Attributed
    assert (found["a"], value["a"]) == (2.0, 1.0)


def test_a_structure_without_tensors_is_returned_itself() -> None:
    for value in (["a"], ("a",), {"a": 1}, Output("a"), Pair(1, 2)):
        assert doubled(value) is value
