"""Shards on servers: neighbours, all of them once, and about the same number of bytes."""

from __future__ import annotations

import pytest

from unidist.buffer import DType
from unidist_parameter_server.store.placement import assign
from unidist_parameter_server.store.shards import FlatMemory, ParameterSlot, cut


@pytest.mark.parametrize("num_servers", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [1, 100, 12_345])
def test_every_shard_is_on_one_server_and_none_has_much_more_than_its_part(num_servers: int, count: int) -> None:
    memories = [
        FlatMemory(DType.FLOAT32, count, (ParameterSlot(0, 0, count),)),
        FlatMemory(DType.FLOAT64, 500, (ParameterSlot(1, 0, 500),)),
    ]
    shards = cut(memories, 1024)
    parts = assign(shards, num_servers)
    assert [index for part in parts for index in part] == list(range(len(shards)))
    sizes = [sum(shards[index].nbytes for index in part) for part in parts]
    assert max(sizes) <= sum(sizes) / num_servers + 1024


def test_more_servers_than_shards_leave_some_without_any() -> None:
    shards = cut([FlatMemory(DType.FLOAT32, 10, (ParameterSlot(0, 0, 10),))], 1024)
    assert sum(len(part) for part in assign(shards, 3)) == 1
