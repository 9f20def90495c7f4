"""Shards: every element of every parameter is in exactly one, and they are of about equal size."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidist.buffer import DType
from unidist.errors import ConfigurationError
from unidist_parameter_server.store.shards import FlatMemory, ParameterSlot, cut, size_in_bytes


@st.composite
def memories(draw: st.DrawFn) -> list[FlatMemory]:
    """Return one or two memories with parameters that begin at cache lines."""
    made, number = [], 0
    for dtype in (DType.FLOAT32, DType.FLOAT64)[: draw(st.integers(1, 2))]:
        slots, end = [], 0
        for count in draw(st.lists(st.integers(0, 300), max_size=8)):
            slots.append(ParameterSlot(number, end, count))
            end += -(-count // 16) * 16
            number += 1
        made.append(FlatMemory(dtype, end, tuple(reversed(slots))))
    return made


@given(memories(), st.integers(1, 4000))
def test_every_element_is_in_exactly_one_shard(memories: list[FlatMemory], partition: int) -> None:
    shards = cut(memories, partition)
    for number, memory in enumerate(memories):
        own = [shard for shard in shards if shard.memory == number]
        assert [shard.begin for shard in own[:1]] == ([0] if memory.count else [])
        assert sum(shard.count for shard in own) == memory.count
        assert all(shard.begin + shard.count == after.begin for shard, after in itertools.pairwise(own))
        for slot in memory.slots:
            places = [
                (piece.first + k, shard.begin + piece.start + k)
                for shard in own
                for piece in shard.pieces
                if piece.parameter == slot.parameter
                for k in range(piece.stop - piece.start)
            ]
            assert places == [(k, slot.offset + k) for k in range(slot.count)]


@given(memories(), st.integers(64, 4000))
def test_shards_are_balanced(memories: list[FlatMemory], partition: int) -> None:
    for number, memory in enumerate(memories):
        sizes = [shard.nbytes for shard in cut(memories, partition) if shard.memory == number]
        assert all(0 < size <= partition for size in sizes)
        assert not sizes or max(sizes) - min(sizes[:-1] or sizes) <= 64, memory


@pytest.mark.parametrize(("text", "size"), [("256KiB", 1 << 18), ("4MiB", 4 << 20), ("1000B", 1000), ("1GiB", 1 << 30)])
def test_sizes_have_units(text: str, size: int) -> None:
    assert size_in_bytes(text, "shard_size") == size


@pytest.mark.parametrize("text", ["256", "0KiB", "-1B", "1.5MiB", "KiB", "256 KiB", "256kb"])
def test_a_size_without_meaning_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"shard_size=.*as in 256KiB"):
        size_in_bytes(text, "shard_size")
