"""Data whose reduction is known: patterns of small whole numbers, which every element type holds exactly. Pure.

A pattern repeats after a few elements. So it is written and compared block by block, as bytes, without numpy.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp

_MOST = 100
"""Sums stay below about this, which an int8 holds, and a bfloat16 exactly."""
_BLOCK_BYTES = 1 << 16
_GARBAGE = 0x5A
_FORMATS = {
    DType.BOOL: "?",
    DType.UINT8: "B",
    DType.INT8: "b",
    DType.UINT16: "H",
    DType.INT16: "h",
    DType.UINT32: "I",
    DType.INT32: "i",
    DType.UINT64: "Q",
    DType.INT64: "q",
    DType.FLOAT16: "e",
    DType.FLOAT32: "f",
    DType.FLOAT64: "d",
}


def values_of(seed: int, num_ranks: int, dtype: DType, op: ReduceOp = ReduceOp.SUM) -> list[int]:
    """Return the values of one source, which repeat from the beginning.

    Args:
        seed: of the source: a rank, or another number for each piece.
        num_ranks: whose sources are reduced.
        dtype: of the elements.
        op: the reduction. The factors of a product are 1, but for a 2 on at most one rank in each place.
    """
    if dtype is DType.BOOL:
        return [(value + 1) // 2 % 2 for value in values_of(seed, num_ranks, DType.UINT8)]
    if op is ReduceOp.PRODUCT:
        return [2 if (place + seed) % (2 * num_ranks) == 0 else 1 for place in range(2 * num_ranks)]
    if num_ranks <= _MOST // 2:
        period = max(3, _MOST // num_ranks)
        return [(place + 3 * seed) % period for place in range(period)]
    period = -(-2 * num_ranks // _MOST)
    return [int((place + seed) % period == 0) for place in range(period)]


def reduced(num_ranks: int, op: ReduceOp, dtype: DType) -> list[int]:
    """Return the values that the reduction of the patterns of all ranks, with their rank as seed, must give."""
    sources = [values_of(rank, num_ranks, dtype, op) for rank in range(num_ranks)]
    if dtype is DType.BOOL:
        union = op in (ReduceOp.SUM, ReduceOp.MAX)
        return [int(any(column) if union else all(column)) for column in zip(*sources, strict=True)]
    match op:
        case ReduceOp.SUM:
            return [sum(column) for column in zip(*sources, strict=True)]
        case ReduceOp.PRODUCT:
            return [2 if 2 in column else 1 for column in zip(*sources, strict=True)]
        case ReduceOp.MIN:
            return [min(column) for column in zip(*sources, strict=True)]
        case ReduceOp.MAX:
            return [max(column) for column in zip(*sources, strict=True)]


def fill(buffer: Buffer, values: Sequence[int], *, first: int = 0) -> None:
    """Write the pattern.

    Args:
        buffer: host memory.
        values: of the pattern.
        first: place of the buffer's first element in the pattern.
    """
    memory = buffer.bytes()
    block = _block(values, buffer.dtype, first)
    for start in range(0, len(memory), len(block)):
        part = min(len(block), len(memory) - start)
        memory[start : start + part] = block[:part]


def spoil(buffer: Buffer) -> None:
    """Fill the buffer with what no result is."""
    memory = buffer.bytes()
    for start in range(0, len(memory), _BLOCK_BYTES):
        part = min(_BLOCK_BYTES, len(memory) - start)
        memory[start : start + part] = bytes((_GARBAGE,)) * part


def count_wrong(buffer: Buffer, values: Sequence[int], *, first: int = 0) -> int:
    """Return how many elements differ from the pattern; arguments as of `fill`."""
    memory = buffer.bytes()
    block = _block(values, buffer.dtype, first)
    item = buffer.dtype.itemsize
    wrong = 0
    for start in range(0, len(memory), len(block)):
        part = memory[start : start + len(block)]
        if part != block[: len(part)]:
            wrong += sum(part[at : at + item] != block[at : at + item] for at in range(0, len(part), item))
    return wrong


def _block(values: Sequence[int], dtype: DType, first: int) -> bytes:
    """Return whole repetitions of the pattern, about `_BLOCK_BYTES`."""
    start = first % len(values)
    once = b"".join(_element(value, dtype) for value in (*values[start:], *values[:start]))
    return once * max(1, _BLOCK_BYTES // len(once))


def _element(value: int, dtype: DType) -> bytes:
    if dtype is DType.BFLOAT16:  # the upper half of a float32
        return struct.pack("=H", struct.unpack("=I", struct.pack("=f", value))[0] >> 16)
    if dtype is DType.COMPLEX64:
        return struct.pack("=ff", value, 0)
    if dtype is DType.COMPLEX128:
        return struct.pack("=dd", value, 0)
    return struct.pack("=" + _FORMATS[dtype], value)
