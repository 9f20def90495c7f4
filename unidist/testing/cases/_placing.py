"""Placement of the operands of a test operation, and checks of its result."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator
from unidist.testing.cases._arrays import Array, array_of, buffer_of, difference, storage


class Mode(StrEnum):
    """The memory of source and target."""

    ORDINARY = "ordinary memory"
    IN_PLACE = "ordinary memory, in place"
    ENGINE = "engine memory"
    ENGINE_IN_PLACE = "engine memory, in place"
    MIXED = "engine memory in place on even ranks, ordinary memory on odd ones"

    def engine_on(self, rank: int) -> bool:
        """Return whether the operands of `rank` lie in engine memory."""
        return self in (Mode.ENGINE, Mode.ENGINE_IN_PLACE) or (self is Mode.MIXED and rank % 2 == 0)

    def in_place_on(self, rank: int) -> bool:
        """Return whether source and target of `rank` are the same memory."""
        return self in (Mode.IN_PLACE, Mode.ENGINE_IN_PLACE) or (self is Mode.MIXED and rank % 2 == 0)


def modes_for(count: int, turn: int) -> Iterator[Mode]:
    """Yield every mode for counts that take different ways through an engine, and one, in turn, for tiny ones."""
    modes = list(Mode)
    if count >= 64:
        yield from modes
    else:
        yield in_turn(turn)


def in_turn(number: int) -> Mode:
    """Return one mode; consecutive numbers give all of them."""
    modes = list(Mode)
    return modes[number % len(modes)]


def place(communicator: Communicator, values: Array, dtype: DType, *, engine: bool) -> Buffer:
    """Return a buffer that holds `values`, in engine memory or in ordinary memory."""
    if not engine or not len(values):
        return buffer_of(values.copy(), dtype)
    buffer = communicator.allocate(values.nbytes).cast(dtype)
    array_of(buffer)[:] = values
    return buffer


def room(communicator: Communicator, count: int, dtype: DType, *, engine: bool) -> Buffer:
    """Return a buffer of `count` elements that hold neither zeros nor a likely result."""
    pattern = np.full(count * dtype.itemsize, 1 if dtype is DType.BOOL else 0x5A, np.uint8)
    return place(communicator, pattern.view(storage(dtype)), dtype, engine=engine)


@dataclass
class Outcomes:
    """Checks results on one rank, and keeps a digest of each so that the ranks' bits can be compared.

    Args:
        rank: this rank.
    """

    rank: int
    digests: dict[str, int] = field(default_factory=dict)

    def check(self, what: str, found: Buffer, expected: Array, *, ulps: float = 0.0, identical: bool = True) -> None:
        """Raise AssertionError unless `found` holds `expected`; `identical`: all ranks must have equal bits."""
        array = array_of(found)
        told = difference(array, expected.astype(storage(found.dtype), copy=False), found.dtype, ulps=ulps)
        if told:
            raise AssertionError(f"{what}: on rank {self.rank} {told}")
        if identical:
            self.digests[what] = zlib.crc32(array.tobytes())
