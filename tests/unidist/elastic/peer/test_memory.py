"""Shares of a state that survive the loss of ranks: commits, losses and other numbers of ranks, as threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from unidist.buffer import Buffer
from unidist.checkpoint.format.interface import KeepsState, MemoryState
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, TensorInfo
from unidist.elastic.peer.memory import PeerMemory, Peers
from unidist.errors import CheckpointError, PeerLostError, StateLostError, UsageError
from unidist.testing import ThreadWorld

LENGTHS = (24, 7, 1, 0)


class Worker:
    """A process: its memory of commits, and a share of some tensors, number i of which has the elements step + i."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.memory = PeerMemory()
        self.shares: dict[str, tuple[TensorInfo, Part, bytearray]] = {}

    def divide(self, rank: int, size: int) -> None:
        """Have the share of this rank, with nothing in it."""
        self.shares = {}
        for number, length in enumerate(LENGTHS):
            start, stop = (length * each // size for each in (rank, rank + 1))
            data = Buffer.of(memoryview(bytearray(8 * (stop - start))).cast("d"))
            info = TensorInfo(f"t{number}", (length,), data.dtype)
            self.shares[info.name] = (info, Part.flat((length,), start, stop), data.owner)

    def fill(self, step: int) -> None:
        for number, (_, part, data) in enumerate(self.shares.values()):
            for position in range(part.count):
                memoryview(data)[position] = 1000.0 * step + 100 * number + part.start + position

    def values(self) -> list[list[float]]:
        return [memoryview(data).tolist() for _, _, data in self.shares.values()]

    def states(self, step: int = 0) -> dict[str, KeepsState]:
        pieces = [Piece(info, part, Buffer.of(memoryview(data))) for info, part, data in self.shares.values()]
        return {"model": MemoryState(pieces, {"step": step, "by": {str(self.number): step}})}


def begin(workers: Sequence[Worker], generation: int, hosts: Sequence[int] | None = None) -> tuple[ThreadWorld, Any]:
    world = ThreadWorld(len(workers))

    def peers(rank: int, leaving: frozenset[int] = frozenset()) -> Peers:
        host = 0 if hosts is None else hosts[rank]
        return Peers(world.communicators[rank], generation, workers[rank].number, host, leaving)

    return world, peers


def train(workers: Sequence[Worker], steps: Sequence[int], **options: Any) -> None:
    """Divide the tensors again, and commit at each of the steps."""
    world, peers = begin(workers, 0, **options)

    def main(communicator: Any) -> None:
        worker = workers[communicator.rank]
        worker.divide(communicator.rank, communicator.size)
        for step in steps:
            worker.fill(step)
            worker.memory.commit(peers(communicator.rank), worker.states(step))

    with world:
        world.run(main)


def check_recovery(workers: Sequence[Worker], step: int) -> None:
    """Let the workers form the next world, and see whether each has its share of this step."""
    world, peers = begin(workers, 1)

    def main(communicator: Any) -> None:
        rank, worker = communicator.rank, workers[communicator.rank]
        worker.divide(rank, communicator.size)
        states = worker.states()
        worker.memory.load(peers(rank), states)
        found = worker.values()
        worker.fill(step)
        assert found == worker.values()
        state = states["model"]
        assert isinstance(state, MemoryState)
        assert state.loaded["step"] == step
        assert set(state.loaded["by"].values()) == {step}
        worker.memory.commit(peers(rank), worker.states(step))

    with world:
        world.run(main)


@pytest.mark.parametrize(
    ("size", "lost", "joined"),
    [(2, {0}, 0), (2, {1}, 3), (3, {1}, 1), (4, {0, 2}, 0), (4, {1, 3}, 2), (5, set(), 0), (5, {4}, 2), (1, set(), 2)],
)
def test_shares_of_lost_ranks_come_from_their_neighbours(size: int, lost: set[int], joined: int) -> None:
    workers = [Worker(number) for number in range(size)]
    train(workers, [1, 2])
    left = [worker for worker in workers if worker.number not in lost]
    check_recovery([*left, *(Worker(size + number) for number in range(joined))], 2)


def test_a_lost_host_loses_nothing() -> None:
    workers = [Worker(number) for number in range(6)]
    train(workers, [1, 2], hosts=[0, 0, 1, 1, 2, 2])
    check_recovery([workers[0], workers[1], workers[4], workers[5]], 2)


def test_neighbours_that_are_lost_together_are_an_error_that_names_them() -> None:
    workers = [Worker(number) for number in range(4)]
    train(workers, [1])
    with pytest.raises(StateLostError, match=r"last commit of 4 ranks .* of rank 1 by rank 2"):
        check_recovery([workers[0], workers[3]], 1)


def test_one_loss_after_another_is_survived_when_there_was_a_commit_in_between() -> None:
    workers = [Worker(number) for number in range(4)]
    train(workers, [1, 2])
    check_recovery([workers[0], workers[2], workers[3]], 2)
    check_recovery([workers[3], workers[0]], 2)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_commit_that_not_all_have_made_is_not_taken(first: int) -> None:
    workers = [Worker(number) for number in range(3)]
    world, peers = begin(workers, 0)
    all_have_committed, gone = threading.Barrier(3, timeout=60), threading.Event()

    def main(communicator: Any) -> None:
        rank, worker = communicator.rank, workers[communicator.rank]
        worker.divide(rank, communicator.size)
        worker.fill(1)
        worker.memory.commit(peers(rank), worker.states(1))
        worker.memory.drop_older()
        all_have_committed.wait()
        if rank == 1:
            world.abort("rank 1 is gone")
            gone.set()
            return
        worker.fill(2)
        assert gone.wait(60)
        with pytest.raises(PeerLostError):
            worker.memory.commit(peers(rank), worker.states(2))

    with world:
        world.run(main)
    order = workers[first:] + workers[:first]
    check_recovery([worker for worker in order if worker.number != 1], 1)


def test_those_that_leave_give_their_shares_to_those_that_stay() -> None:
    workers = [Worker(number) for number in range(4)]
    train(workers, [1])
    world, peers = begin(workers, 3)

    def main(communicator: Any) -> None:
        rank, worker = communicator.rank, workers[communicator.rank]
        leaving = frozenset((2, 3)) if rank == 3 else frozenset()  # not all have heard of it
        worker.memory.commit(peers(rank, leaving), worker.states(1))

    with world:
        world.run(main)
    check_recovery(workers[:2], 1)


def test_a_rank_that_is_alone_brings_its_state_into_a_world() -> None:
    old, new = Worker(7), Worker(8)
    for worker, step in ((old, 5), (new, 6)):
        worker.divide(0, 1)
        worker.fill(step)
        with ThreadWorld(1) as world:
            worker.memory.commit(Peers(world.communicators[0], worker=worker.number), worker.states(step))
    check_recovery([old, new], 5)


def test_a_share_is_brought_back_without_the_others() -> None:
    worker = Worker(0)
    worker.divide(1, 3)
    worker.fill(1)
    with ThreadWorld(1) as world:
        worker.memory.commit(Peers(world.communicators[0]), worker.states(1))
        kept = worker.values()
        worker.fill(2)
        assert kept != worker.values()
        worker.memory.restore(worker.states())
        assert kept == worker.values()


def test_an_error_of_one_rank_is_one_of_all() -> None:
    class Refusing(MemoryState):
        def values(self) -> Any:
            raise UsageError("this cannot be kept")

    workers = [Worker(number) for number in range(2)]
    world, peers = begin(workers, 0)

    def main(communicator: Any) -> str:
        rank, worker = communicator.rank, workers[communicator.rank]
        worker.divide(rank, 2)
        states = {"model": Refusing([])} if rank == 1 else worker.states()
        with pytest.raises((UsageError, CheckpointError), match="this cannot be kept") as caught:
            worker.memory.commit(peers(rank), states)
        return str(caught.value)

    with world:
        assert "on rank 1" in world.run(main)[0]
