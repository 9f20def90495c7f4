"""All-gather of updated shards: in place, bucket by bucket."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from unidist.buffer import Buffer
from unidist.communicator import Work
from unidist.timeline import Recorder
from unidist_zero.sharding.partition import Partition
from unidist_zero.sharding.shard_groups import ShardGroup


class ShardGather:
    """Gathers flat memory laid out like a partition's buckets.

    Every rank of a shard group posts the same buckets in the same order, and waits for them before its next exchange.

    Args:
        partition: of the buckets.
        memory: one buffer for each bucket to be gathered, by number, `(bucket.count,)` elements; of any type.
        shard_groups: by kind of memory.
        recorder: takes one event per bucket.
    """

    def __init__(
        self,
        partition: Partition,
        memory: Sequence[Buffer] | Mapping[int, Buffer],
        shard_groups: Mapping[str, ShardGroup],
        recorder: Recorder | None = None,
    ) -> None:
        self._partition = partition
        self._memory = memory
        self._shard_groups = shard_groups
        self._recorder = recorder or Recorder()
        self._pending: list[tuple[int, Work, int]] = []

    def own(self, number: int) -> Buffer:
        """Return this rank's shard of bucket `number`, within the bucket's memory."""
        cut = self._partition.buckets[number]
        rank = self._shard_groups[cut.memory].communicator.rank
        return self._memory[number].slice(cut.begin(rank), cut.counts[rank])

    def post(self, number: int) -> None:
        """Start gathering bucket `number`. This rank's shard must be up to date, and nobody may read the bucket."""
        cut = self._partition.buckets[number]
        shard = self._shard_groups[cut.memory].communicator
        if shard.size == 1 or not cut.count:
            return
        started = time.monotonic_ns() if self._recorder.timeline is not None else 0
        work = shard.allgather(self.own(number), self._memory[number], counts=cut.counts)
        self._pending.append((number, work, started))

    def wait(self) -> None:
        """Return when everything posted has arrived."""
        pending, self._pending = self._pending, []
        for number, work, started in pending:
            self._recorder.wait(work)
            timeline = self._recorder.timeline
            if timeline is not None and started:
                timeline.record("exchange", "ALLGATHER", started, time.monotonic_ns(), tensor=f"parameters {number}")

    def all(self) -> None:
        """Gather every bucket."""
        for number in range(len(self._memory)):
            self.post(number)
        self.wait()
