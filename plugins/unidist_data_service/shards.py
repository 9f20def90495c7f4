"""Which part of a stream a data worker reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataShard:
    """The part of the data that one data worker reads: `files[shard.index :: shard.count]`, say.

    Args:
        index: of this part, from 0.
        count: number of parts.
    """

    index: int
    count: int
