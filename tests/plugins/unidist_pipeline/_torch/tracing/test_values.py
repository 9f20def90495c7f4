"""Structures of values keep their classes; their forms tell apart what a model can tell apart."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="the values are of PyTorch")

from unidist.errors import UsageError  # noqa: E402 - after importorskip
from unidist_pipeline._torch.tracing.values import (  # noqa: E402 - after importorskip
    changed,
    constant,
    form_of,
    message_of,
    tensors_in,
    value_of,
)


class Pair(NamedTuple):
    """A named tuple."""

    left: Any
    right: Any


@dataclass(frozen=True)
class Frozen:
    """A dataclass with a field that its constructor does not take."""

    first: Any
    second: Any = None
    third: Any = field(default=3, init=False)


class Named(dict[str, Any]):
    """A dict with an attribute of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.label = "kept"


def structures(x: Any, y: Any) -> list[Any]:
    """Return one structure of each class, of two leaves."""
    return [
        (x, [y]), {"a": x, 1: (y,)}, Pair(x, Pair(y, None)), Frozen(x, Frozen(y)), OrderedDict(b=x, a=y),
        Named(u=x, v=y), deque([x, y]),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(7))
def test_every_leaf_is_changed_and_classes_stay(number: int) -> None:
    before, expected = structures(1, 2)[number], structures(10, 20)[number]
    found = changed(lambda item: item * 10 if item in (1, 2) else item, before)
    assert found == expected
    assert type(found) is type(expected)
    assert before == structures(1, 2)[number], "the argument stays as it was"
    if isinstance(found, Named):
        assert found.label == "kept"


@pytest.mark.parametrize("number", range(7))
def test_messages_keep_classes(number: int) -> None:
    x, y = torch.ones(2), torch.zeros(3)
    message, _ = message_of(structures(x, y)[number], "a value")
    assert [tuple(each.shape) for each in message.tensors] == [(2,), (3,)]
    again = value_of(message.form, message.tensors)
    assert type(again) is type(structures(x, y)[number])
    assert [tuple(each.shape) for each in tensors_in(again)] == [(2,), (3,)]


def form(value: Any) -> Any:
    """Return the form of a value without tensors."""
    return form_of(value, lambda item: constant(item, "it"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True), (1, 1.0), (0.0, -0.0), ((1,), [1]), ({"a": 1}, {"a": 2}), ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Frozen(1), Frozen(2)), (Frozen(1), Frozen(1, 2)), (Pair(1, 2), (1, 2)), (slice(1), slice(2)), ({1}, {2}),
        (torch.float32, torch.float64), ("1", 1), (torch.relu, torch.tanh), (Named(a=1), {"a": 1}), (None, False),
    ],
)  # fmt: skip
def test_forms_tell_values_apart(one: Any, other: Any) -> None:
    assert form(one) != form(other)
    assert form(one) == form(one)
    assert len({form(one), form(other), form(one)}) == 2


def test_values_that_may_change_unnoticed_have_no_form() -> None:
    with pytest.raises(UsageError, match=r"argument 'cache' is or contains builtins.object"):
        constant(object(), "argument 'cache'")
