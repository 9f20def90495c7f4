"""Pushes from flat memory, and fetches to the memory of parameters: stores may copy it in C, all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unidist.algorithms import copy_memory
from unidist_parameter_server.store.shards import ShardPiece, StoreShard

Array = np.ndarray[Any, np.dtype[Any]]

_STREAMED_BYTES = 1 << 16
"""More is copied past the caches."""


class FlatChange:
    """A `Push.change` that returns parts of flat memory.

    Args:
        memories: one array for each flat memory; see `StoreShard.memory`.
    """

    def __init__(self, memories: Sequence[Array]) -> None:
        self.memories = tuple(memories)
        self.addresses = np.array([memory.ctypes.data for memory in memories], np.int64)

    def __call__(self, shard: StoreShard) -> Array:
        """Return the part of a shard."""
        part: Array = self.memories[shard.memory][shard.begin : shard.begin + shard.count]
        return part


class FlatTargets:
    """A receiver that writes to the memory of parameters.

    Args:
        shards: all of the store.
        targets: the memory of each parameter, flat and writable.
    """

    def __init__(self, shards: Sequence[StoreShard], targets: Sequence[Array]) -> None:
        self.places = [[_Place(targets[piece.parameter], piece) for piece in shard.pieces] for shard in shards]
        self.addresses = np.array([place.address for places in self.places for place in places], np.int64)
        self.nbytes = sum(target.nbytes for target in targets)

    def __call__(self, index: int) -> Callable[[Array], None]:
        """Return what takes the values of a shard."""

        def receive(values: Array) -> None:
            address = values.ctypes.data if copy_memory is not None else 0
            for place in self.places[index]:
                target, piece = place.target, place.piece
                if copy_memory is not None and target.nbytes >= _STREAMED_BYTES:
                    copy_memory(place.address, address + piece.start * target.itemsize, target.nbytes)
                else:
                    target[:] = values[piece.start : piece.stop]

        return receive


class _Place:
    """The memory to which a piece of a shard is fetched.

    Args:
        target: the memory of its parameter.
        piece: of the shard.
    """

    __slots__ = ("address", "piece", "target")

    def __init__(self, target: Array, piece: ShardPiece) -> None:
        self.target = target[piece.first : piece.first + piece.stop - piece.start]
        self.piece = piece
        self.address = self.target.ctypes.data
