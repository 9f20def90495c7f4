"""The layout of parameters in shards. Pure arithmetic, the same on every rank.

Parameters lie one after the other in flat memory, one for each element type, as the gradients of a `LocalExchange` do.
Each memory is cut into shards of about the same size, across parameters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from unidist.buffer import DType
from unidist.errors import ConfigurationError

_UNIT_BYTES = 64
"""Shards begin at a cache line."""

_SIZE = re.compile(r"(\d+)(B|KiB|MiB|GiB)")
_FACTORS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class ParameterSlot:
    """The place of a parameter in flat memory: elements `offset` to `offset + count`."""

    parameter: int
    offset: int
    count: int


@dataclass(frozen=True)
class FlatMemory:
    """Flat memory for parameters of one type.

    Args:
        dtype: of the elements.
        count: number of elements, with the gaps between parameters.
        slots: the parameters in it.
    """

    dtype: DType
    count: int
    slots: tuple[ParameterSlot, ...]


@dataclass(frozen=True)
class ShardPiece:
    """The part of a parameter in a shard.

    Args:
        parameter: its number.
        start: first element in the shard.
        stop: one after the last element in the shard.
        first: the first element's place in the parameter, in memory order.
    """

    parameter: int
    start: int
    stop: int
    first: int


@dataclass(frozen=True)
class StoreShard:
    """Elements `begin` to `begin + count` of one flat memory.

    Args:
        memory: number of the flat memory.
        dtype: of the elements.
        begin: first element.
        count: number of elements.
        pieces: the parameters' parts in it, in their order in memory.
    """

    memory: int
    dtype: DType
    begin: int
    count: int
    pieces: tuple[ShardPiece, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.dtype.itemsize


def cut(memories: Sequence[FlatMemory], partition_bytes: int) -> tuple[StoreShard, ...]:
    """Cut flat memories into shards of at most `partition_bytes`, rounded up to a cache line, of nearly equal size.

    Args:
        memories: equal on every rank.
        partition_bytes: at least 1.
    """
    shards = []
    for number, memory in enumerate(memories):
        unit = max(1, _UNIT_BYTES // memory.dtype.itemsize)
        num_units = -(-memory.count // unit)
        num_shards = -(-num_units // max(1, partition_bytes // (unit * memory.dtype.itemsize)))
        ends = [min(memory.count, num_units * k // num_shards * unit) for k in range(1, num_shards + 1)]
        slots = sorted((slot for slot in memory.slots if slot.count), key=lambda slot: slot.offset)
        begin = first_slot = 0
        for end in ends:
            pieces = []
            while first_slot < len(slots) and slots[first_slot].offset + slots[first_slot].count <= begin:
                first_slot += 1
            for slot in slots[first_slot:]:
                if slot.offset >= end:
                    break
                low, high = max(begin, slot.offset), min(end, slot.offset + slot.count)
                pieces.append(ShardPiece(slot.parameter, low - begin, high - begin, low - slot.offset))
            shards.append(StoreShard(number, memory.dtype, begin, end - begin, tuple(pieces)))
            begin = end
    return tuple(shards)


def size_in_bytes(text: str, where: str) -> int:
    """Return the bytes of "256KiB", "4MiB" or "1000B".

    Args:
        text: a whole number above 0 with a unit.
        where: the option, for the message.

    Raises:
        ConfigurationError: it is something else.
    """
    found = _SIZE.fullmatch(text)
    if found is None or not int(found[1]):
        raise ConfigurationError(
            f"{where}={text}: give a whole number above 0 with a unit ({', '.join(_FACTORS)}), as in 256KiB"
        )
    return int(found[1]) * _FACTORS[found[2]]
