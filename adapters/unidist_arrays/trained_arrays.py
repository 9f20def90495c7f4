"""Parameters that a compiled step hands to the host, as arrays that may be written to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from typing_extensions import override

from unidist.buffer import Buffer
from unidist.errors import UsageError
from unidist.optim import TrainedState
from unidist_arrays.memory import Array, buffer_of_array, empty_array

__all__ = ["TrainedArrays", "copies_of"]


class TrainedArrays(TrainedState):
    """Parameters, and slots if they are there as well, in arrays of this process.

    Args:
        arrays: of the parameters, C-contiguous; they are changed in place.
        slots: of the optimizer, by name; None: they are not at hand.
    """

    def __init__(self, arrays: Sequence[Array], slots: Mapping[str, Array] | None = None) -> None:
        self._arrays, self._slots = arrays, slots

    @override
    def values(self) -> Sequence[Buffer]:
        return [buffer_of_array(each) for each in self._arrays]

    @override
    def store(self, values: Sequence[Buffer]) -> None:
        """Do nothing: `values` are the arrays' memory."""

    @override
    def slots(self) -> Mapping[str, Buffer]:
        if self._slots is None:
            raise UsageError("within a compiled step the optimizer's slots are not at hand; act on them before a save")
        return {name: buffer_of_array(each) for name, each in self._slots.items()}

    @override
    def store_slots(self, slots: Mapping[str, Buffer]) -> None:
        """Do nothing, likewise."""


def copies_of(arrays: Sequence[Array]) -> list[Array]:
    """Return copies that may be written to, and that frameworks take over as they are."""
    found = []
    for array in map(np.asarray, arrays):
        copy = empty_array(array.shape, array.dtype)
        np.copyto(copy, array)
        found.append(copy)
    return found
