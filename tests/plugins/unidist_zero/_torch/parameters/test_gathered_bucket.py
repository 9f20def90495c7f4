"""The memory of a bucket stays while a gather may write to it, or a script has a view of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
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


class Alone(Engine):
    """A communicator of one rank whose exchanges are done at once."""

    def allgather(self, source: Buffer, target: Buffer, **_: Any) -> Work:
        target.owner.copy_(source.owner)
        return Done()

    def allreduce(self, source: Buffer, target: Buffer, **_: Any) -> Work:
        return Done()


class Done(Work):
    """What is over."""

    def wait(self, timeout: object = None) -> None:
        pass

    def done(self) -> bool:
        return True


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "data": lambda parameter: parameter.data,
    "detached": lambda parameter: parameter.detach(),
    "slice": lambda parameter: parameter[10:].view(-1, 10),
}


@pytest.mark.parametrize("ends", ["release", "abandon"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_that_a_script_keeps_stays_readable(view: str, ends: str) -> None:
    bucket, parameter = bucket_of(Alone())
    bucket.release()
    bucket.gather_for_writing()
    with torch.no_grad():
        parameter.fill_(2.0)
    kept = VIEWS[view](parameter)
    if ends == "release":
        bucket.release(spares_views=True)
    else:
        bucket.abandon()
    nbytes = kept.untyped_storage().nbytes()
    assert nbytes == 4 * COUNT, "reading it would end the process"
    assert bool((kept == 2.0).all())
    assert bucket.nbytes_held == 0
    if ends == "release":
        bucket.finish_gather()
        assert bool((parameter == 2.0).all()), "other memory holds the values from now on"


def test_without_views_a_bucket_frees_its_memory_and_uses_it_again() -> None:
    bucket, _ = bucket_of(Alone())
    flat = bucket._flat
    for _ in range(2):
        bucket.release(spares_views=True)
        assert bucket.nbytes_held == 0
        bucket.gather_for_writing()
        assert bucket._flat is flat


@pytest.mark.parametrize("waits", [False, True], ids=["in flight", "failed"])
def test_an_abandoned_bucket_leaves_its_memory_to_a_gather_that_may_still_write(waits: bool) -> None:
    engine = Engine()
    bucket, _ = bucket_of(engine)
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


def bucket_of(engine: Any) -> tuple[GatheredBucket, torch.Tensor]:
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
    return bucket, parameter
