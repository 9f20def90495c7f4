"""Which server keeps which shards. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from unidist_parameter_server.store.shards import StoreShard


def assign(shards: Sequence[StoreShard], num_servers: int) -> tuple[range, ...]:
    """Return the numbers of the shards of each server: neighbours, of about the same number of bytes.

    Args:
        shards: all of them.
        num_servers: at least 1. With fewer shards than servers the last servers have none.
    """
    total = sum(shard.nbytes for shard in shards)
    ends = []
    passed = index = 0
    for server in range(1, num_servers + 1):
        while index < len(shards) and passed + shards[index].nbytes / 2 <= total * server / num_servers:
            passed += shards[index].nbytes
            index += 1
        ends.append(index)
    ends[-1] = len(shards)
    return tuple(range(begin, end) for begin, end in zip([0, *ends], ends, strict=False))
