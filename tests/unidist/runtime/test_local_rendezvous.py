"""The rendezvous of one host: who is let in, and what is told when somebody is missing."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TypeVar

import pytest

from unidist.errors import ConfigurationError, PeerLostError, StalledError
from unidist.runtime.local_rendezvous import LocalRendezvous

pytestmark = pytest.mark.usefixtures("leak_check")

R = TypeVar("R")
SHORT, LONG = timedelta(seconds=0.4), timedelta(seconds=60)
MEANWHILE = timedelta(seconds=1.5)  # is waited out too, but somebody else has to come in it


def meet(rank: int, size: int, key: str, *, secret: bytes = b"s", timeout: timedelta = LONG) -> LocalRendezvous:
    return LocalRendezvous(rank=rank, world_size=size, key=key, secret=secret, timeout=timeout)


@pytest.fixture
def key() -> str:
    return secrets.token_hex(8)


def address(key: str) -> str:
    return "\0unidist/" + hashlib.sha256(f"{os.getuid()}/{key}".encode()).hexdigest()


def connect_to(key: str) -> socket.socket:
    """Connect as soon as rank 0 listens."""
    deadline = time.monotonic() + 30
    while True:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            stranger.connect(address(key))
            return stranger
        except OSError:
            stranger.close()
            assert time.monotonic() < deadline


def together(*calls: Callable[[], R]) -> list[R | BaseException]:
    """Run the calls at the same time and return what each returned or raised."""

    def caught(call: Callable[[], R]) -> R | BaseException:
        try:
            return call()
        except Exception as exc:
            return exc

    with ThreadPoolExecutor(len(calls)) as executor:
        return list(executor.map(caught, calls))


def all_ranks(size: int, key: str) -> list[LocalRendezvous]:
    made = together(*(partial(meet, rank, size, key) for rank in range(size)))
    assert all(isinstance(item, LocalRendezvous) for item in made), made
    return made


def close(made: list[LocalRendezvous]) -> None:
    for item in made:
        item.close()
        item.close()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_rank_gets_what_all_gave_in_rank_order(key: str, size: int) -> None:
    made = all_ranks(size, key)
    for turn in range(3):
        replies = together(*(partial(item.allgather, f"{item.rank}/{turn}".encode(), timeout=LONG) for item in made))
        for reply in replies:
            assert [item.payload.decode() for item in reply] == [f"{rank}/{turn}" for rank in range(size)]
    close(made)


def test_descriptors_are_handed_to_every_rank(key: str) -> None:
    made = all_ranks(3, key)

    def give(item: LocalRendezvous) -> list[bytes]:
        descriptor = os.memfd_create("given")
        os.write(descriptor, f"from {item.rank}".encode())
        replies = item.allgather(b"", fds=(descriptor,), timeout=LONG)
        os.close(descriptor)
        found = []
        for reply in replies:
            assert not os.get_inheritable(reply.fds[0])
            found.append(os.pread(reply.fds[0], 100, 0))
            os.close(reply.fds[0])
        return found

    assert together(*(partial(give, item) for item in made)) == [[b"from 0", b"from 1", b"from 2"]] * 3
    close(made)


def test_missing_ranks_are_named_to_all_that_came(key: str) -> None:
    begin = time.monotonic()
    errors = together(lambda: meet(0, 4, key, timeout=MEANWHILE), lambda: _first_exchange(meet(2, 4, key)))
    assert time.monotonic() - begin < LONG.total_seconds() / 2
    for error in errors:
        assert isinstance(error, StalledError)
        assert "ranks 1, 3 of 4" in str(error)
        assert "UNIDIST_START_TIMEOUT_SEC" in str(error)
    assert errors[0].ranks == (1, 3)


def test_a_missing_rank_0_is_named(key: str) -> None:
    with pytest.raises(StalledError, match="rank 1 waited for rank 0") as caught:
        meet(1, 2, key, timeout=SHORT)
    assert caught.value.ranks == (0,)


def test_a_wrong_secret_is_turned_away(key: str) -> None:
    leader, member = together(
        lambda: meet(0, 2, key, timeout=MEANWHILE), lambda: meet(1, 2, key, secret=b"other", timeout=LONG)
    )
    assert isinstance(leader, StalledError)
    assert isinstance(member, ConfigurationError | StalledError)
    assert "secret" in str(member) or "rank 0" in str(member)


def test_another_world_size_is_turned_away(key: str) -> None:
    leader, member = together(lambda: meet(0, 2, key, timeout=MEANWHILE), lambda: meet(1, 3, key))
    assert isinstance(leader, StalledError)
    assert isinstance(member, ConfigurationError | StalledError)


def test_a_stranger_that_stalls_does_not_hold_up_the_job(key: str) -> None:
    made: list[LocalRendezvous | BaseException] = []
    thread = threading.Thread(target=lambda: made.extend(together(lambda: meet(0, 2, key, timeout=LONG))))
    thread.start()
    stranger = connect_to(key)  # says nothing
    begin = time.monotonic()
    member = meet(1, 2, key, timeout=LONG)
    thread.join(LONG.total_seconds())
    assert time.monotonic() - begin < LONG.total_seconds() / 2
    assert isinstance(made[0], LocalRendezvous), made
    stranger.close()
    close([made[0], member])


def test_a_stranger_that_talks_nonsense_is_turned_away(key: str) -> None:
    made: list[LocalRendezvous | BaseException] = []
    thread = threading.Thread(target=lambda: made.extend(together(lambda: meet(0, 2, key, timeout=LONG))))
    thread.start()
    for nonsense in (b"x", b"y" * 60, b"z" * 1000):
        stranger = connect_to(key)
        stranger.send(nonsense)
        stranger.close()
    member = meet(1, 2, key, timeout=LONG)
    thread.join(LONG.total_seconds())
    assert isinstance(made[0], LocalRendezvous), made
    close([made[0], member])


def test_two_jobs_with_one_key_are_told_apart(key: str) -> None:
    made = together(lambda: meet(0, 2, key, timeout=MEANWHILE), lambda: meet(0, 2, key, timeout=MEANWHILE))
    assert sorted(type(item).__name__ for item in made) == ["ConfigurationError", "StalledError"]


def test_a_rank_that_dies_before_its_exchange_is_named_to_all(key: str) -> None:
    made = all_ranks(3, key)
    made[1].close()
    errors = together(*(partial(item.allgather, b"", timeout=LONG) for item in (made[0], made[2])))
    for error in errors:
        assert isinstance(error, PeerLostError)
        assert "rank 1" in str(error)
    close(made)


def test_a_rank_that_does_not_answer_is_named(key: str) -> None:
    made = all_ranks(3, key)
    errors = together(lambda: made[0].allgather(b"", timeout=MEANWHILE), lambda: made[1].allgather(b"", timeout=LONG))
    assert isinstance(errors[0], StalledError)
    assert errors[0].ranks == (2,)
    assert isinstance(errors[1], StalledError)
    close(made)


def test_too_large_a_contribution_is_refused(key: str) -> None:
    made = all_ranks(2, key)
    with pytest.raises(ValueError, match="131072 bytes"):
        made[0].allgather(bytes(128 << 10), timeout=SHORT)
    close(made)


def _first_exchange(made: LocalRendezvous) -> LocalRendezvous:
    try:
        made.allgather(b"", timeout=LONG)
    finally:
        made.close()
    return made
