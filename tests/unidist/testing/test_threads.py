"""The world of threads: messages, splits, failures."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator
from unidist.errors import MismatchError, PeerLostError, StalledError, UsageError
from unidist.testing.threads import ThreadCommunicator, ThreadWorld


def byte(value: int) -> Buffer:
    return Buffer.of(bytearray([value]))


def test_run_returns_the_results_in_rank_order() -> None:
    with ThreadWorld(4) as world:
        assert world.run(lambda communicator: communicator.rank * 10) == [0, 10, 20, 30]
        assert world.run(lambda communicator: communicator.size) == [4] * 4


def test_messages_arrive_in_order_whoever_comes_first() -> None:
    def main(communicator: Communicator) -> list[int]:
        if communicator.rank == 0:
            for value in range(10):
                communicator.send(byte(value), to=1).wait()
            return []
        received = [byte(0) for _ in range(10)]
        works = [communicator.recv(buffer, source=0) for buffer in received]
        for work in reversed(works):
            work.wait()
            assert work.done()
        return [buffer.bytes()[0] for buffer in received]

    with ThreadWorld(2) as world:
        assert world.run(main)[1] == list(range(10))


def test_a_sent_buffer_may_be_changed_after_the_wait() -> None:
    def main(communicator: Communicator) -> None:
        buffer = byte(7)
        communicator.send(buffer, to=0).wait()
        buffer.bytes()[0] = 9
        received = byte(0)
        communicator.recv(received, source=0).wait()
        assert received.bytes()[0] == 7

    with ThreadWorld(1) as world:
        world.run(main)


def test_a_message_of_another_size_is_a_mismatch() -> None:
    def main(communicator: Communicator) -> None:
        communicator.send(Buffer.allocate(3, DType.INT8), to=0)
        with pytest.raises(MismatchError, match="rank 0 receives 2 bytes from rank 0, which sent 3"):
            communicator.recv(Buffer.allocate(2, DType.INT8), source=0).wait()

    with ThreadWorld(1) as world:
        world.run(main)


def test_split_renumbers_and_keeps_groups_apart() -> None:
    def main(communicator: Communicator) -> tuple[tuple[int, ...], int] | None:
        groups = {0: [2, 0], 2: [2, 0], 1: [1], 3: []}
        part = communicator.split(groups[communicator.rank])
        if part is None:
            return None
        data = byte(communicator.rank)
        part.broadcast(data, root=0).wait()
        return part.members, data.bytes()[0]

    with ThreadWorld(4) as world:
        assert world.run(main) == [((2, 0), 2), ((1,), 1), ((2, 0), 2), None]


def test_a_split_that_a_member_does_not_come_to_stalls_and_can_be_aborted() -> None:
    def stall(communicator: Communicator) -> None:
        if communicator.rank == 0:
            with pytest.raises(StalledError, match="split on rank 0: ranks 1 did not come"):
                communicator.split([0, 1])

    def abort(communicator: Communicator) -> None:
        if communicator.rank == 0:
            with pytest.raises(PeerLostError, match="rank 1 aborted: not today"):
                communicator.split([0, 1])
        else:
            communicator.abort("not today")

    with ThreadWorld(2, timeout=timedelta(seconds=0.05)) as world:
        world.run(stall)
    with ThreadWorld(2) as world:
        world.run(abort)


def test_split_without_this_rank_is_refused() -> None:
    with ThreadWorld(2) as world, pytest.raises(UsageError, match=r"split\(\[1\]\) on rank 0"):
        world.communicators[0].split([1])


def test_the_first_exception_ends_the_other_ranks_and_is_raised() -> None:
    def main(communicator: Communicator) -> None:
        if communicator.rank == 1:
            raise KeyError("from rank 1")
        communicator.recv(byte(0), source=1).wait()

    with ThreadWorld(3) as world, pytest.raises(KeyError, match="from rank 1"):
        world.run(main)


def test_a_run_that_does_not_end_names_the_late_ranks() -> None:
    def main(communicator: Communicator) -> None:
        if communicator.rank == 1:
            never.wait(30)

    never = threading.Event()
    with ThreadWorld(2) as world, pytest.raises(StalledError, match=r"ranks 1 did not return within 1 s"):
        world.run(main, timeout=timedelta(seconds=1))
    never.set()


def test_a_receive_that_gets_nothing_stalls_and_aborts() -> None:
    def main(communicator: Communicator) -> None:
        if communicator.rank == 0:
            with pytest.raises(StalledError, match=r"rank 0 got no message from rank 1 within 0.05 s"):
                communicator.recv(byte(0), source=1).wait(timedelta(seconds=0.05))
        else:
            with pytest.raises(PeerLostError, match="rank 0 got no message"):
                communicator.recv(byte(0), source=0).wait()

    with ThreadWorld(2) as world:
        world.run(main)


def test_close_lets_others_receive_what_was_sent_and_no_more() -> None:
    def main(communicator: ThreadCommunicator) -> None:
        if communicator.rank == 1:
            communicator.send(byte(5), to=0).wait()
            communicator.close()
            with pytest.raises(UsageError, match="after close"):
                communicator.send(byte(5), to=0)
            return
        received = byte(0)
        communicator.recv(received, source=1).wait()
        assert received.bytes()[0] == 5
        with pytest.raises(PeerLostError, match="rank 1 closed its communicator") as caught:
            communicator.recv(received, source=1).wait()
        assert caught.value.ranks == (1,)

    with ThreadWorld(2) as world:
        world.run(main)
