"""Samples by number: rows of arrays, or elements of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from data_ranks import as_rank

from unidist.errors import UsageError
from unidist_arrays.numbered_samples import NumberedSamples


def flatten(data: Any) -> list[Any]:
    """Return the leaves of tuples and dicts."""
    if isinstance(data, dict):
        data = tuple(data.values())
    return [leaf for each in data for leaf in flatten(each)] if isinstance(data, tuple) else [data]


def tree_map(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply a function to the leaves of a tuple or dict."""
    if isinstance(data, dict):
        return {name: tree_map(function, each) for name, each in data.items()}
    return tuple(tree_map(function, each) for each in data) if isinstance(data, tuple) else function(data)


def numbered(data: Any, collate: Callable[[Any], Any] | None = None) -> NumberedSamples:
    """Return the samples of data."""
    return NumberedSamples(data, collate, flatten=flatten, tree_map=tree_map)


def test_rows_of_arrays() -> None:
    samples = numbered({"x": np.arange(10).reshape(5, 2), "y": np.arange(5)})
    found = samples.batch([3, 0])
    assert (samples.count, samples.makes_arrays) == (5, True)
    assert (found["x"].tolist(), found["y"].tolist()) == ([[6, 7], [0, 1]], [3, 0])
    cut = numbered((np.arange(4), np.arange(4)), lambda rows: rows[0] + rows[1])
    assert cut.batch([1, 2]).tolist() == [2, 4]


@pytest.mark.parametrize("data", [["a", "bb", "c"], ("a", "bb", "c"), "abc"])
def test_elements_of_a_sequence(data: Any) -> None:
    assert (numbered(data).count, numbered(data).makes_arrays) == (3, False)
    assert numbered(data).batch([2, 0]) == ["c", "a"]
    assert (numbered(data, "-".join).batch([2, 0]), numbered(data, "-".join).makes_arrays) == ("c-a", True)


def test_a_list_of_arrays_is_a_list_of_samples() -> None:
    samples = numbered([np.arange(2), np.arange(3), np.arange(3)])
    assert samples.count == 3
    assert [len(each) for each in samples.batch([1, 0])] == [3, 2]


def test_what_has_no_numbers_is_an_error() -> None:
    with as_rank(0, 2):
        for wrong in (iter([1]), 5, {1, 2}):
            with pytest.raises(UsageError, match=rf"of a {type(wrong).__name__} \(rank 1\): it picks samples"):
                numbered(wrong)
        with pytest.raises(UsageError, match=r"which have \[2, 3\] rows"):
            numbered((np.arange(2), np.arange(3)))
