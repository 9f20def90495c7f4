"""A script's own values come back from a checkpoint as they were, and can be read where JSON has them."""

from __future__ import annotations

import collections
import json
import math
from typing import Any

import numpy as np
import pytest

from unidist.checkpoint.fetched_section import FetchedSection
from unidist.checkpoint.plain_state import PlainState, decoded, encoded
from unidist.errors import CheckpointError

VALUES = [
    None,
    3,
    0.1 + 0.2,
    math.inf,
    "text",
    [1, [2.5, None]],
    {"a": {"b": [True]}},
    (1, 2),
    [(0, 1), (0, 2)],
    {1: "a"},
    {"pickled\0": 1},
    {3, 4},
    b"\0\1",
    np.float64(0.1),
    collections.OrderedDict(a=1),
]


def section(values: dict[str, Any]) -> FetchedSection:
    return FetchedSection("extra", {}, json.loads(json.dumps(values)), None, what="the section")


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_as_what_it_was(value: Any) -> None:
    found = decoded(json.loads(json.dumps(encoded(value))))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", VALUES[:7], ids=repr)
def test_what_json_has_stays_readable(value: Any) -> None:
    assert encoded(value) == value


def test_rank_0_writes_and_every_rank_takes() -> None:
    taken: list[dict[str, Any]] = []
    first, other = (PlainState(lambda: {"epoch": 3}, taken.append, is_writer=flag) for flag in (True, False))
    assert (first.values(), other.values()) == ({"epoch": 3}, {})
    for state in (first, other):
        state.check(section({"epoch": 5}), strict=True)
        state.load(section({"epoch": 5}), strict=True)
    assert taken == [{"epoch": 5}, {"epoch": 5}]


def test_other_names_than_were_saved_are_refused() -> None:
    state = PlainState(lambda: {"epoch": 3}, dict, is_writer=True)
    with pytest.raises(CheckpointError, match="that were saved: epoch, step; values of this state: epoch"):
        state.check(section({"epoch": 5, "step": 1}), strict=True)
