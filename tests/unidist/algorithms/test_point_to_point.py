"""The collectives that are made from send and recv."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, ReduceOp
from unidist.errors import PeerLostError, StalledError, UsageError
from unidist.testing.threads import ThreadCommunicator, ThreadWorld

SIZES = range(1, 8)


def buffer_of(data: np.ndarray) -> Buffer:
    return Buffer.of(data)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 5, 1000])
def test_allgather_concatenates_equal_pieces(size: int, count: int) -> None:
    def main(communicator: Communicator) -> list[int]:
        target = np.zeros(size * count, np.int64)
        communicator.allgather(buffer_of(np.full(count, communicator.rank)), buffer_of(target)).wait()
        return target.tolist()

    with ThreadWorld(size) as world:
        assert world.run(main) == [[rank for rank in range(size) for _ in range(count)]] * size


@pytest.mark.parametrize("size", SIZES)
def test_allgather_concatenates_uneven_pieces(size: int) -> None:
    counts = [(3 * rank) % 4 for rank in range(size)]

    def main(communicator: Communicator) -> list[int]:
        target = np.full(sum(counts), -1)
        source = np.full(counts[communicator.rank], communicator.rank)
        communicator.allgather(buffer_of(source), buffer_of(target), counts=counts).wait()
        return target.tolist()

    with ThreadWorld(size) as world:
        assert world.run(main) == [[rank for rank in range(size) for _ in range(counts[rank])]] * size


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_copies_from_every_root(size: int) -> None:
    def main(communicator: Communicator) -> None:
        for root in range(size):
            data = np.full(5, communicator.rank, np.int16)
            communicator.broadcast(buffer_of(data), root=root).wait()
            assert data.tolist() == [root] * 5

    with ThreadWorld(size) as world:
        world.run(main)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("in_place", [False, True])
def test_reducescatter_leaves_each_rank_its_piece(size: int, in_place: bool) -> None:
    counts = [(2 * rank + 1) % 4 for rank in range(size)]
    first = np.cumsum([0, *counts])

    def main(communicator: Communicator) -> None:
        rank = communicator.rank
        source = np.arange(sum(counts), dtype=np.float64) + 100 * rank
        before = source.copy()
        own = slice(first[rank], first[rank + 1])
        target = source[own] if in_place else np.zeros(counts[rank])
        communicator.reducescatter(
            buffer_of(source), buffer_of(target), op=ReduceOp.SUM, scale=0.5, counts=counts
        ).wait()
        expected = (np.arange(sum(counts)) * size + 100 * sum(range(size))) * 0.5
        np.testing.assert_array_equal(target, expected[own])
        if not in_place:
            np.testing.assert_array_equal(source, before)

    with ThreadWorld(size) as world:
        world.run(main)


@pytest.mark.parametrize("size", SIZES)
def test_alltoall_transposes(size: int) -> None:
    def main(communicator: Communicator) -> None:
        rank = communicator.rank
        send_counts = [(rank + to) % 3 for to in range(size)]
        receive_counts = [(source + rank) % 3 for source in range(size)]
        source = np.concatenate([np.full(count, 10 * rank + to) for to, count in enumerate(send_counts)])
        target = np.zeros(sum(receive_counts), np.int64)
        communicator.alltoall(
            buffer_of(source), buffer_of(target), send_counts=send_counts, receive_counts=receive_counts
        ).wait()
        assert target.tolist() == [10 * i + rank for i, count in enumerate(receive_counts) for _ in range(count)]

    with ThreadWorld(size) as world:
        world.run(main)


@pytest.mark.parametrize("size", SIZES)
def test_nobody_passes_a_barrier_before_all_have_come(size: int) -> None:
    come: list[int] = []

    def main(communicator: Communicator) -> None:
        for turn in range(1, 20):
            come.append(communicator.rank)
            communicator.barrier().wait()
            assert len(come) >= turn * size

    with ThreadWorld(size) as world:
        world.run(main)


def test_messages_of_the_user_do_not_mix_with_those_of_collectives() -> None:
    def main(communicator: Communicator) -> None:
        message = np.full(1, -1)
        if communicator.rank == 0:
            receiving = communicator.recv(buffer_of(message), source=1)
        data = np.ones(1, np.int64)
        communicator.allreduce(buffer_of(data), buffer_of(data)).wait()
        if communicator.rank == 1:
            communicator.send(buffer_of(np.full(1, 42)), to=0).wait()
        if communicator.rank == 0:
            receiving.wait()
            assert message[0] == 42
        assert data[0] == 3

    with ThreadWorld(3) as world:
        world.run(main)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c, b: c.allreduce(b, b.slice(0, 1)), "target holds 1 elements, but the operation needs 4"),
        (lambda c, b: c.allreduce(b, b.cast(DType.UINT8).slice(0, 4)), "source is int32 .* target is uint8"),
        (lambda c, b: c.allgather(b, b), "target holds 4 elements, but the operation needs 8"),
        (lambda c, b: c.allgather(b, b, counts=[4]), r"counts \[4\] must be 2 numbers"),
        (lambda c, b: c.broadcast(b, root=2), "root=2 is not a rank of this group; choices: 0 to 1"),
        (lambda c, b: c.reducescatter(b, b), "source holds 4 elements, but the operation needs 8"),
        (lambda c, b: c.alltoall(b, b, send_counts=[4, 0], receive_counts=[1, -1]), "at least 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call: Callable[[Communicator, Buffer], Any], words: str) -> None:
    def main(communicator: Communicator) -> None:
        with pytest.raises(UsageError, match=words):
            call(communicator, Buffer.allocate(4, DType.INT32))

    with ThreadWorld(2) as world:
        world.run(main)


def test_an_abort_ends_a_collective_of_another_rank() -> None:
    def main(communicator: ThreadCommunicator) -> None:
        communicator.barrier()  # opens the channel of the collectives
        channel_open.wait()
        if communicator.rank == 1:
            communicator.abort("enough")
            return
        with pytest.raises(PeerLostError, match="barrier over threads, ranks 0, 1: rank 1 aborted: enough"):
            communicator.barrier()

    channel_open = threading.Barrier(2, timeout=30)
    with ThreadWorld(2) as world:
        world.run(main)


def test_a_stall_names_the_operation_and_the_rank() -> None:
    def main(communicator: Communicator) -> None:
        communicator.barrier()  # opens the channel of the collectives
        if communicator.rank == 0:
            words = r"allreduce \(butterfly\) of 4 int8 .* no message from rank 1"
            with pytest.raises(StalledError, match=words) as caught:
                communicator.allreduce(Buffer.allocate(4, DType.INT8), Buffer.allocate(4, DType.INT8))
            assert caught.value.ranks == (1,)

    with ThreadWorld(2, timeout=timedelta(seconds=1)) as world:
        world.run(main)
