"""Sharded gradients and parameters without a framework: partition, reduce-scatter, all-gather, shared memory, files.

Imports the core only. A binding to another framework uses the names listed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_zero.sharding.all_gather import ShardGather
    from unidist_zero.sharding.gathered_model import gathered
    from unidist_zero.sharding.partition import Partition, Piece, Segment, ShardedBucket, join_segments
    from unidist_zero.sharding.reduce_scatter import ReduceScatterExchange
    from unidist_zero.sharding.shard_groups import ShardGroup

__all__ = [
    "Partition", "Piece", "ReduceScatterExchange", "Segment", "ShardGather", "ShardGroup", "ShardedBucket", "gathered",
    "join_segments",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "all_gather": "ShardGather",
        "gathered_model": "gathered",
        "partition": "Partition Piece Segment ShardedBucket join_segments",
        "reduce_scatter": "ReduceScatterExchange",
        "shard_groups": "ShardGroup",
    },
)
