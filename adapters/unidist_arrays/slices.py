"""Sparse gradients (embeddings): gathered instead of reduced, so that only the rows that were used travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from unidist.communicator import Communicator
from unidist.gradients.buckets import ParameterInfo
from unidist_arrays.memory import NUMPY_DTYPES, Array, buffer_of_array, empty_array

__all__ = ["GatheredSlices", "Slices"]

INDEX = np.dtype(np.int64)


@dataclass(frozen=True)
class Slices:
    """Rows of a gradient, as `tf.IndexedSlices` has them: a row may occur several times.

    Args:
        values: `(rows, ...)`.
        indices: `(rows,)` int64.
    """

    values: Array
    indices: Array

    def dense(self, shape: Sequence[int]) -> Array:
        """Return the gradient of this shape, repeated rows added up."""
        result = empty_array(shape, self.values.dtype)
        result.fill(0)
        np.add.at(result, self.indices, self.values)
        return result

    def coalesced(self) -> Slices:
        """Return the same gradient with each row once, repeated rows added up."""
        rows, where = np.unique(self.indices, return_inverse=True)
        values = empty_array((len(rows), *self.values.shape[1:]), self.values.dtype)
        values.fill(0)
        np.add.at(values, where, self.values)
        return Slices(values, rows)

    def elements(self, begin: int, end: int) -> Slices:
        """Return the elements `begin` to `end` of the flat gradient that are in rows, one row for each."""
        width = prod(self.values.shape[1:])
        near = (self.indices * width < end) & ((self.indices + 1) * width > begin)
        values = self.values[near].reshape(-1)
        indices = (self.indices[near, None] * width + np.arange(width)).reshape(-1)
        inside = (begin <= indices) & (indices < end)
        return Slices(values[inside], indices[inside])

    @classmethod
    def of(cls, gradient: Array | Slices) -> Slices:
        """Return all rows of a dense gradient; slices as they are."""
        if isinstance(gradient, Slices):
            return gradient
        return cls(gradient, np.arange(gradient.shape[0], dtype=INDEX))


class GatheredSlices:
    """The sparse gradients of one exchange, by place.

    Args:
        communicator: over the ranks that exchange.
        parameters: which gradients are sparse, equal on every rank.
    """

    def __init__(self, communicator: Communicator, parameters: Mapping[int, ParameterInfo]) -> None:
        self._communicator = communicator
        self._parameters = dict(parameters)
        self._pending: dict[int, list[Slices]] = {}

    def __contains__(self, place: int) -> bool:
        return place in self._parameters

    def add(self, place: int, gradient: Array | Slices) -> None:
        """Keep this rank's gradient of a pass until the exchange. The arrays may be reused by their owner."""
        slices = Slices.of(gradient)
        self._pending.setdefault(place, []).append(Slices(np.array(slices.values), np.array(slices.indices, INDEX)))

    def exchange(self, scale: float) -> dict[int, Slices]:
        """Return `scale` times the slices of all ranks, in rank order, where any rank has some. Collective."""
        if not self._parameters:
            return {}
        own = np.array([self._rows(place) for place in self._parameters], INDEX)
        everyone = np.empty((self._communicator.size, own.size), INDEX)
        self._communicator.allgather(buffer_of_array(own), buffer_of_array(everyone)).wait()
        found = {}
        for (place, info), rows in zip(self._parameters.items(), everyone.T, strict=True):
            if (rows < 0).all():
                continue
            counts = np.maximum(rows, 0).tolist()
            dtype, rest = NUMPY_DTYPES[info.dtype], info.shape[1:]
            parts = self._pending.get(place, [])
            values = _joined([part.values for part in parts], (0, *rest), dtype)
            indices = _joined([part.indices for part in parts], (0,), INDEX)
            found[place] = Slices(self._gather(values, counts), self._gather(indices, counts))
            found[place].values[...] = found[place].values * np.asarray(scale, dtype)
        self._pending.clear()
        return found

    def _rows(self, place: int) -> int:
        """Return the number of this rank's rows; -1 if it has no gradient at all."""
        parts = self._pending.get(place)
        return -1 if parts is None else sum(len(part.indices) for part in parts)

    def _gather(self, own: Array, counts: Sequence[int]) -> Array:
        rest = own.shape[1:]
        target = empty_array((sum(counts), *rest), own.dtype)
        elements = [count * prod(rest) for count in counts]
        self._communicator.allgather(buffer_of_array(own), buffer_of_array(target), counts=elements).wait()
        return target


def _joined(parts: Sequence[Array], shape: tuple[int, ...], dtype: np.dtype) -> Array:
    if not parts:
        return np.empty(shape, dtype)
    return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts), dtype)
