"""Samples by number, of arrays with one row for each or of a sequence, in batches of any of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unidist.errors import UsageError
from unidist.runtime import context
from unidist_arrays.token_batches import Samples

__all__ = ["NumberedSamples", "row_count"]


class NumberedSamples(Samples):
    """Data of which batches pick samples by number.

    Args:
        data: a tuple or dict of arrays, or one array; else an object with `__len__` and `__getitem__`, such as a list.
        collate: makes a batch of a list of samples, or of rows of the arrays; None: that is the batch.
        flatten: returns the leaves of a tree.
        tree_map: of a function and a tree.

    Attributes:
        count: number of samples.
        makes_arrays: batches are rows of arrays, or what `collate` makes.

    Raises:
        UsageError: samples have no numbers, or arrays different numbers of rows.
    """

    def __init__(
        self,
        data: Any,
        collate: Callable[[Any], Any] | None,
        *,
        flatten: Callable[[Any], Sequence[Any]],
        tree_map: Callable[..., Any],
    ) -> None:
        self._data, self._collate, self._tree_map = data, collate, tree_map
        leaves = [] if isinstance(data, list) else flatten(data)  # a list of arrays is a list of samples
        self._has_rows = bool(leaves) and all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves)
        self.makes_arrays = self._has_rows or collate is not None
        if self._has_rows:
            self.count = row_count(leaves)
        elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
            self.count = len(data)
        else:
            raise UsageError(
                f"shard(max_tokens=) of a {type(data).__name__} (rank {context.current().topology.rank}): it picks "
                "samples by their length. Give a sequence of samples (an object with __len__ and __getitem__, such as "
                "a list), or a tuple or dict of arrays"
            )

    def batch(self, indices: list[int]) -> Any:
        """Return the batch of these samples."""
        if self._has_rows:
            rows = operator.itemgetter(np.asarray(indices, np.int64))
            found = self._tree_map(rows, self._data)
        else:
            found = [self._data[index] for index in indices]
        return found if self._collate is None else self._collate(found)


def row_count(leaves: Sequence[Any]) -> int:
    """Return the number of rows, which all arrays have.

    Raises:
        UsageError: they have different numbers, or none.
    """
    counts = sorted({len(leaf) if np.ndim(leaf) else 0 for leaf in leaves})
    if len(counts) != 1 or counts == [0]:
        raise UsageError(
            f"shard() divides the rows of arrays, which have {counts} rows; give all as many, at least one"
        )
    return int(counts[0])
