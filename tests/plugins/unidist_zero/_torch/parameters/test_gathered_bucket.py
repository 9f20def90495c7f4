"""The memory of a bucket stays while a gather may write to it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import Work
from unidist.errors import PeerLostError
from unidist_torch.memory import buffer_of
from unidist_zero._torch.parameters.gathered_bucket import BucketState, GatheredBucket
from unidist_zero.sharding.gather_check import GatherCheck
from unidist_zero.sharding.partition import ShardedBucket, Slot
from unidist_zero.sharding.shard_groups import ShardGroup

COUNT = 1000


class Lost(Work):
    """A gather whose peers are gone."""

    def wait(self, timeout: object = None) -> None:
        raise PeerLostError("rank 1 is gone")

    def done(self) -> bool:
        return False


class Engine:
    """A communicator of one rank whose gathers stay under way: it keeps their targets."""

    rank, size, members = 0, 1, (0,)

    def __init__(self) -> None:
        self.targets: list[Buffer] = []

    def allgather(self, source: Buffer, target: Buffer, **_: Any) -> Work:
        self.targets.append(target)
        return Lost()


@pytest.mark.parametrize("waits", [False, True], ids=["in flight", "failed"])
def test_an_abandoned_bucket_leaves_its_memory_to_a_gather_that_may_still_write(waits: bool) -> None:
    engine: Any = Engine()
    parameter = torch.nn.Parameter(torch.ones(COUNT))
    bucket = GatheredBucket(
        0,
        ShardedBucket(DType.FLOAT32, HOST, (Slot(0, 0, COUNT),), (COUNT,)),
        [],
        {0: parameter},
        ShardGroup(engine),
        buffer_of(torch.zeros(COUNT)),
        GatherCheck(engine, 0, ["layer"]),
    )
    bucket.release()
    assert bucket.nbytes_held == 0
    bucket.start_gather()
    if waits:
        with pytest.raises(PeerLostError):
            bucket.finish_gather()
    bucket.abandon()
    assert bucket.state is BucketState.LOST
    assert bucket.nbytes_held == 0
    (target,) = engine.targets
    nbytes = target.owner.untyped_storage().nbytes()
    assert nbytes >= 4 * COUNT, "the engine writes to freed memory"
    assert target.owner.data_ptr() == target.address
    kept = weakref.ref(target.owner)
    engine.targets.clear()
    del target
    gc.collect()
    assert kept() is None, "nobody frees the memory"
