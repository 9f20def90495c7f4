"""The saved position of a loader."""

from __future__ import annotations

import json
from typing import Any

import pytest

from unidist.errors import UsageError
from unidist.training.loader_state import LoaderPosition, LoaderState


def load(state: Any, *, data: str = "5 samples", most_parts: int = 1) -> LoaderState:
    return LoaderState.of_dict(state, data=data, most_parts=most_parts, rank=3)


def test_a_state_is_plain_data_and_is_read_again() -> None:
    state = LoaderState(LoaderPosition(2, (64,)), "5 samples", 17)
    assert load(json.loads(json.dumps(state.as_dict()))) == state
    assert state.position.start == 64
    assert LoaderPosition().start == 0


def test_a_state_of_other_data_is_an_error() -> None:
    state = LoaderState(LoaderPosition(2, (64,)), "5 samples").as_dict()
    with pytest.raises(UsageError, match=r"rank 3: the state is of 5 samples, and this loader has 6 samples"):
        load(state, data="6 samples")
    with pytest.raises(UsageError, match=r"rank 3 was given the keys \['model'\]"):
        load({"model": 1})
    with pytest.raises(UsageError, match="a list"):
        load([])
    for changed in ({"epoch": -1}, {"epoch": "1"}, {"processed": 5}, {"processed": [1.5]}):
        with pytest.raises(UsageError, match="returned, unchanged"):
            load(state | changed)


def test_parts_of_a_stream_need_as_many_workers() -> None:
    state = LoaderState(LoaderPosition(0, (8, 6)), "5 samples")
    assert load(state.as_dict(), most_parts=2) == state
    with pytest.raises(UsageError, match=r"num_workers=1\. Give it num_workers=2"):
        load(state.as_dict())
