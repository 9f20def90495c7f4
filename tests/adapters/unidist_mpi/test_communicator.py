"""The engine `mpi`, under a real mpirun, against the contract of communicators."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from mpi_pool import MpiPool

from unidist.buffer import DType
from unidist.communicator import Communicator, ReduceOp
from unidist.errors import MismatchError, PeerLostError, RemoteError, UsageError
from unidist.testing import CommunicatorConformance
from unidist.testing.cases._arrays import array_of, buffer_of

pytestmark = pytest.mark.parallel


class TestMpiCommunicator(CommunicatorConformance):
    engine = "mpi"
    sizes: ClassVar[Sequence[int]] = (1, 3)
    detects_mismatch = False  # MPI compares nothing
    life_cycles = 6
    seeds = (1,)
    in_pairs = True  # ranks that wait keep their cores busy

    @pytest.fixture(autouse=True)
    def _use_pool(self, mpi_pool: Callable[..., MpiPool]) -> None:
        self._rank_pool = mpi_pool  # type: ignore[assignment]  # as far as the suite uses one

    def test_the_death_of_a_rank_is_noticed_by_all_others(self, group_size: int, moment: str) -> None:
        """`mpirun` ends the whole job: no rank is left that could be told."""
        if moment not in ("barrier", "large allreduce"):
            pytest.skip("the end of the job is the same at every moment")
        pool = self._rank_pool(group_size)
        assert isinstance(pool, MpiPool)
        begin = time.monotonic()
        with pytest.raises(RemoteError, match="died"):
            self.run(group_size, _die, moment)
        assert pool.mpirun.wait(30) != 0
        assert time.monotonic() - begin < 50

    def test_large_arrays_go_in_segments(self, size: int) -> None:
        self.run(size, _in_segments)

    def test_what_mpi_cannot_count_goes_in_parts(self, size: int) -> None:
        self.run(size, _in_parts)

    def test_a_rank_that_closes_is_not_waited_for(self, group_size: int) -> None:
        for rank, (seconds, ranks) in enumerate(self.run_connecting(group_size, _leave)[:-1]):
            assert ranks == (group_size - 1,), f"rank {rank} names {ranks}"
            assert seconds < 30, f"rank {rank} noticed after {seconds:.2f} s"

    def test_it_tells_whom_a_wait_is_for(self, group_size: int) -> None:
        self.run_connecting(group_size, _watch_a_wait)

    def test_groups_that_do_not_agree_are_a_mismatch(self, group_size: int) -> None:
        self.run(group_size, _disagree_on_groups)

    def test_counts_that_do_not_agree_are_an_error(self, group_size: int) -> None:
        texts = self.run_connecting(group_size, _disagree_on_counts)
        assert any("sizes" in text for text in texts), texts


@pytest.mark.soak
class TestMpiCommunicatorOfOtherSizes(TestMpiCommunicator):
    sizes = (2, 3, 4)
    life_cycles = 20
    in_pairs = False


def _die(communicator: Communicator, moment: str) -> None:
    communicator.barrier().wait()
    if communicator.rank == communicator.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if moment == "barrier":
        communicator.barrier().wait()
    else:
        communicator.allreduce(_numbers(3_000_017, 1), _numbers(3_000_017, 1)).wait()


def _in_segments(communicator: Communicator) -> None:
    from unidist_mpi import collectives

    size, rank = communicator.size, communicator.rank
    before = collectives._SEGMENT_BYTES, collectives._RING_BYTES_PER_RANK
    collectives._SEGMENT_BYTES, collectives._RING_BYTES_PER_RANK = 800, 1
    try:
        for count in (1, 2, 99, 100, 101, 300, 1501):
            given, in_place, target = _numbers(count, rank), _numbers(count, rank), _numbers(count, -1)
            communicator.allreduce(given, target).wait()
            communicator.allreduce(in_place, in_place, op=ReduceOp.MAX).wait()
            assert (array_of(target) == sum(range(size))).all()
            assert (array_of(in_place) == size - 1).all()
            assert (array_of(given) == rank).all()
            source, piece = _numbers(count * size, rank), _numbers(count, -1)
            communicator.reducescatter(source, piece, scale=2.0).wait()
            assert (array_of(piece) == 2 * sum(range(size))).all()
            assert (array_of(source) == rank).all()
    finally:
        collectives._SEGMENT_BYTES, collectives._RING_BYTES_PER_RANK = before
        communicator.close()  # its scratch memory is as small


def _in_parts(communicator: Communicator) -> None:
    from unidist_mpi import collectives

    size, rank = communicator.size, communicator.rank
    before, collectives.MAX_BYTES = collectives.MAX_BYTES, 1000
    try:
        buffer = buffer_of(np.arange(999) * (rank == 0), DType.INT64)
        communicator.broadcast(buffer, root=0).wait()
        assert (array_of(buffer) == np.arange(999)).all()
        counts = [500 + other for other in range(size)]
        everything = _numbers(sum(counts), -1)
        communicator.allgather(_numbers(counts[rank], rank), everything, counts=counts).wait()
        assert (array_of(everything) == np.repeat(range(size), counts)).all()
        communicator.alltoall(
            everything,
            taken := _numbers(counts[rank] * size, -1),
            send_counts=counts,
            receive_counts=[counts[rank]] * size,
        ).wait()
        assert (array_of(taken) == rank).all()
        with pytest.raises(UsageError, match="31 bits"):
            communicator.send(buffer, to=0)
    finally:
        collectives.MAX_BYTES = before


def _leave(connects: Any) -> tuple[float, tuple[int, ...]]:
    communicator = connects.connect("leave")
    communicator.barrier().wait()
    begin, ranks = time.monotonic(), ()
    if communicator.rank != communicator.size - 1:
        with pytest.raises(PeerLostError, match="left") as caught:
            communicator.barrier().wait()
        ranks = caught.value.ranks
    connects.close(communicator)
    return time.monotonic() - begin, ranks


def _watch_a_wait(connects: Any) -> None:
    communicator, side = connects.connect("watched"), connects.connect("side")
    late = communicator.rank == communicator.size - 1
    waiter = threading.Thread(target=lambda: communicator.barrier().wait())
    if not late:
        assert not communicator.waiting_for()
        waiter.start()
        limit = time.monotonic() + 30
        while communicator.waiting_for() != (communicator.size - 1,):
            assert time.monotonic() < limit, f"rank {communicator.rank} says {communicator.waiting_for()}"
            time.sleep(0.01)
    side.barrier().wait()
    if late:
        waiter.start()
    waiter.join(30)
    assert not waiter.is_alive()
    assert not communicator.waiting_for()
    connects.close(communicator)
    connects.close(side)


def _disagree_on_groups(communicator: Communicator) -> None:
    everybody = list(range(communicator.size))
    with pytest.raises(MismatchError, match="another list"):
        communicator.split(everybody if communicator.rank else everybody[::-1])
    communicator.barrier().wait()


def _disagree_on_counts(connects: Any) -> str:
    communicator = connects.connect("counts")
    counts = [3] * communicator.size
    if communicator.rank == 0:
        counts[1] = 2
    text = ""
    try:
        communicator.allgather(_numbers(counts[communicator.rank], 1), _numbers(sum(counts), 1), counts=counts).wait()
        communicator.barrier().wait()
    except (MismatchError, PeerLostError) as exc:
        text = str(exc)
    connects.close(communicator)
    return text


def _numbers(count: int, value: int) -> Any:
    return buffer_of(np.full(count, value, np.int64), DType.INT64)
