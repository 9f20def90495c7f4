"""The rendezvous over a control server: as the one of a host, with ranks as threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TypeVar

import pytest

from unidist.control.coordinator import Coordinator
from unidist.control.meeting import Meeting
from unidist.control.rendezvous import ControlRendezvous
from unidist.control.server import ControlServer
from unidist.errors import ConfigurationError, PeerLostError, StalledError, UsageError
from unidist.rendezvous import MeetingPlace
from unidist.topology import Topology

pytestmark = pytest.mark.usefixtures("leak_check")

R = TypeVar("R")
SECRET = b"s" * 32
SHORT, LONG = timedelta(seconds=0.3), timedelta(seconds=60)
SIZE = 3


@pytest.fixture
def server() -> Iterator[ControlServer]:
    coordinator = Coordinator(num_hosts=1, world_size=SIZE, heartbeat=timedelta(seconds=5))
    with ControlServer(coordinator, SECRET) as running:
        yield running


def meet(
    server: ControlServer,
    rank: int,
    *,
    size: int = SIZE,
    epoch: int = 0,
    generation: int = 0,
    secret: bytes = SECRET,
    timeout: timedelta = LONG,
) -> ControlRendezvous:
    place = MeetingPlace(("127.0.0.1", server.port), "10.0.0.1", generation)
    topology = Topology(rank, size, 0, 1, rank, size)
    return ControlRendezvous(place, topology, epoch=epoch, secret=secret, timeout=timeout)


def together(*calls: Callable[[], R]) -> list[R | BaseException]:
    def caught(call: Callable[[], R]) -> R | BaseException:
        try:
            return call()
        except Exception as exc:
            return exc

    with ThreadPoolExecutor(len(calls)) as executor:
        return list(executor.map(caught, calls))


def all_ranks(server: ControlServer, epoch: int = 0) -> list[ControlRendezvous]:
    made = together(*(partial(meet, server, rank, epoch=epoch) for rank in range(SIZE)))
    assert all(isinstance(item, ControlRendezvous) for item in made), made
    return made  # type: ignore[return-value]


def wait_for(server: ControlServer, *ranks: int) -> None:
    """Wait until these ranks wait for the others."""
    coordinator = server._service
    assert isinstance(coordinator, Coordinator)
    deadline = time.monotonic() + 30
    while not any(
        payloads.keys() >= set(ranks) for each in list(coordinator._meetings.values()) for payloads in _rounds(each)
    ):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _rounds(meeting: Meeting) -> list[dict[int, str]]:
    return list(meeting._rounds.values())


def test_every_rank_gets_what_all_gave_again_and_again(server: ControlServer) -> None:
    for epoch in range(3):
        made = all_ranks(server, epoch)
        for turn in range(3):
            replies = together(
                *(partial(item.allgather, bytes([rank, turn, 255]), timeout=LONG) for rank, item in enumerate(made))
            )
            for reply in replies:
                assert [item.payload for item in reply] == [bytes([rank, turn, 255]) for rank in range(SIZE)]  # type: ignore[union-attr]
        for item in made:
            item.close()
            item.close()


def test_the_address_of_the_host_is_the_one_that_the_launcher_found(server: ControlServer) -> None:
    made = all_ranks(server)
    assert {item.address for item in made} == {"10.0.0.1"}
    for item in made:
        item.close()


def test_missing_ranks_are_named_to_all_that_came(server: ControlServer) -> None:

    def meet_later() -> ControlRendezvous:
        wait_for(server, 2)
        return meet(server, 0, timeout=timedelta(seconds=1))  # in which it has to connect, too

    begin = time.monotonic()
    errors = together(meet_later, lambda: meet(server, 2))
    assert time.monotonic() - begin < LONG.total_seconds() / 2
    for error in errors:
        assert isinstance(error, StalledError)
        assert error.ranks == (1,)
        assert "rank 1 of 3 did not come in time" in str(error)


def test_a_rank_that_dies_is_named_to_those_who_wait(server: ControlServer) -> None:
    made = all_ranks(server)

    def die() -> None:
        time.sleep(0.05)  # the others wait by then; nothing depends on it
        made[1]._client.close()

    errors = together(*(partial(item.allgather, b"", timeout=LONG) for item in (made[0], made[2])), die)  # type: ignore[arg-type]
    for error in errors[:2]:
        assert isinstance(error, PeerLostError)
        assert error.ranks == (1,)
    for item in made:
        item.close()


def test_a_rank_that_does_not_answer_is_named(server: ControlServer) -> None:
    made = all_ranks(server)

    def give_later() -> object:
        wait_for(server, 0)
        return made[1].allgather(b"", timeout=SHORT)

    errors = together(lambda: made[0].allgather(b"", timeout=LONG), give_later)
    for error in errors:
        assert isinstance(error, StalledError)
        assert error.ranks == (2,)
    for item in made:
        item.close()


def test_a_wrong_secret_has_no_place(server: ControlServer) -> None:
    with pytest.raises(PeerLostError, match="cannot use the job's control server"):
        meet(server, 0, secret=b"other")


def test_another_world_size_or_a_second_process_of_a_rank_has_no_place(server: ControlServer) -> None:
    with pytest.raises(ConfigurationError, match="no place in this job of 3 ranks"):
        meet(server, 0, size=4)

    def meet_as_another() -> ControlRendezvous:
        wait_for(server, 0, 1)
        with pytest.raises(ConfigurationError, match="rank 0 is there already"):
            meet(server, 0)
        return meet(server, 2)

    for item in together(lambda: meet(server, 0), lambda: meet(server, 1), meet_as_another):
        assert isinstance(item, ControlRendezvous), item
        item.close()


def test_a_process_of_an_older_generation_is_told_that_it_is_stale(server: ControlServer) -> None:
    coordinator = server._service
    assert isinstance(coordinator, Coordinator)
    server.call(lambda: coordinator.begin_generation(SIZE))
    with pytest.raises(PeerLostError, match="generation 0 of this job, which is at 1"):
        meet(server, 0, generation=0)


def test_the_end_of_the_launcher_is_told() -> None:
    coordinator = Coordinator(num_hosts=1, world_size=SIZE, heartbeat=timedelta(seconds=5))
    with ControlServer(coordinator, SECRET) as server:
        made = all_ranks(server)
    for item in made:
        with pytest.raises(PeerLostError, match="lost the job's control server"):
            item.allgather(b"", timeout=LONG)
        item.close()


def test_descriptors_and_large_payloads_are_refused(server: ControlServer) -> None:
    made = all_ranks(server)
    with pytest.raises(UsageError, match="descriptors"):
        made[0].allgather(b"", fds=(0,), timeout=SHORT)
    with pytest.raises(ValueError, match="131072 bytes"):
        made[0].allgather(bytes(128 << 10), timeout=SHORT)
    for item in made:
        item.close()
