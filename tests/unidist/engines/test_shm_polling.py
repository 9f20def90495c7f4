"""A thread may move an operation while others issue more; and groups of some ranks, which those ranks make alone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from unidist.buffer import Buffer
from unidist.communicator_capabilities import MakesSubgroups
from unidist.engines.shm import ShmEngine
from unidist.errors import MismatchError, UsageError
from unidist.rendezvous import Contribution, SingleRendezvous
from unidist.runtime import LocalRendezvous, context
from unidist.testing.fixtures import RankPoolFactory
from unidist.topology import Topology

pytestmark = pytest.mark.parallel
SECONDS = timedelta(seconds=90)


def issue_while_polling(mark: Path) -> tuple[bool, bool, list[int]]:
    """Rank 1 comes when rank 0 has issued both operations. Return whether it has, `poll` said so, and the results."""
    world = context.init().world
    data = [Buffer.of(bytearray([world.rank + 1])), Buffer.of(bytearray([world.rank + 3]))]
    world.barrier().wait()
    deadline = time.monotonic() + 60
    while world.rank == 1 and not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    is_issued = world.rank == 0 or mark.exists()
    first = world.allreduce(data[0], data[0])
    done = []
    thread = threading.Thread(target=lambda: done.append(first.poll(SECONDS)))
    thread.start()
    time.sleep(0.2)  # it waits by now
    second = world.allreduce(data[1], data[1])
    mark.touch()
    thread.join()
    first.wait()
    second.wait()
    context.shutdown()
    return is_issued, done == [True], [each.bytes()[0] for each in data]


def test_operations_are_issued_while_a_thread_waits_for_an_earlier_one(
    rank_pool: RankPoolFactory, tmp_path: Path
) -> None:
    for is_issued, is_done, sums in rank_pool(2).run(issue_while_polling, (tmp_path / "issued",)):
        assert is_issued
        assert is_done
        assert sums == [3, 7]


def poll_in_vain() -> bool:
    """Return what `poll` says when its time is up; the operation goes on."""
    world = context.init().world
    world.barrier().wait()
    if world.rank == 1:
        time.sleep(0.3)
    work = world.barrier()
    found = work.poll(timedelta(milliseconds=20))
    work.wait()
    context.shutdown()
    return found


def test_an_operation_whose_turn_is_over_goes_on(rank_pool: RankPoolFactory) -> None:
    assert rank_pool(2).run(poll_in_vain)[0] is False


def make_subgroups(key: str) -> list[int]:
    """Let each rank make its groups in an order of its own; return sums over them."""
    world = context.init().world
    assert isinstance(world, MakesSubgroups)
    groups = {0: [(0, 1), (0, 2), (2, 1, 0)], 1: [(0, 1), (2, 1, 0)], 2: [(0, 2), (2, 1, 0)]}[world.rank]
    sums = []
    for ranks in groups:
        meeting = LocalRendezvous(
            rank=ranks.index(world.rank), world_size=len(ranks), key=f"{key}/{ranks}", secret=b"", timeout=SECONDS
        )
        group = world.subgroup(ranks, meeting, timeout=SECONDS)
        assert group.members == ranks
        assert group.timeout == SECONDS
        data = world.allocate(1)  # engine memory of the one is that of the other
        data.bytes()[0] = world.rank + 1
        group.allreduce(data, data).wait()
        sums.append(data.bytes()[0])
        meeting.close()
        group.close()
    for wrong in ((0, 0, 1, 2), (), (world.rank + 1,)):
        with pytest.raises(UsageError):
            world.subgroup(wrong, SingleRendezvous(), timeout=SECONDS)
    context.shutdown()
    return sums


def test_members_make_a_group_without_the_others(rank_pool: RankPoolFactory) -> None:
    assert rank_pool(3).run(make_subgroups, (f"{os.getpid()}/subgroups",)) == [[3, 4, 6], [3, 6], [4, 6]]


def disagree(key: str) -> str:
    """Return the error of members that passed different lists."""
    world = context.init().world
    assert isinstance(world, MakesSubgroups)
    meeting = LocalRendezvous(rank=world.rank, world_size=2, key=key, secret=b"", timeout=SECONDS)
    ranks = (0, 1) if world.rank == 0 else (1, 0)
    try:
        world.subgroup(ranks, meeting, timeout=SECONDS)
    except MismatchError as exc:
        return str(exc)
    finally:
        meeting.close()
        context.shutdown()
    return ""


def test_members_that_disagree_are_told(rank_pool: RankPoolFactory) -> None:
    for text in rank_pool(2).run(disagree, (f"{os.getpid()}/disagree",)):
        assert "passed another list" in text


SECONDS = timedelta(seconds=30)


def test_members_wait_for_each_other_as_long_as_the_caller_says() -> None:
    limits: list[timedelta] = []

    class Noting(SingleRendezvous):
        def allgather(self, payload: bytes, *, fds: Sequence[int] = (), timeout: timedelta) -> list[Contribution]:
            limits.append(timeout)
            return super().allgather(payload, fds=fds, timeout=timeout)

    world = ShmEngine().connect(Topology(), SingleRendezvous(), timeout=2 * SECONDS)
    assert isinstance(world, MakesSubgroups)
    world.subgroup((0,), Noting(), timeout=SECONDS).close()
    world.close()
    assert limits == [SECONDS]
