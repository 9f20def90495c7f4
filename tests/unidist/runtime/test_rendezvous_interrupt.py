"""A rendezvous that waits for ranks which never come ends when its generation does."""

from __future__ import annotations

import threading
import time
import uuid
from datetime import timedelta

import pytest

from unidist.errors import PeerLostError
from unidist.runtime.local_rendezvous import Interrupt, LocalRendezvous

LONG = timedelta(seconds=60)


@pytest.mark.parametrize("rank", [0, 1])
def test_waiting_for_others_to_come_is_interrupted(rank: int) -> None:
    interrupt = Interrupt()
    timer = threading.Timer(0.1, interrupt.set, ["rank 2 was lost"])
    timer.start()
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 2 was lost"):
        LocalRendezvous(rank=rank, world_size=3, key=uuid.uuid4().hex, secret=b"s", timeout=LONG, interrupt=interrupt)
    assert time.monotonic() - began < 30
    timer.join()
    interrupt.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_round_that_others_do_not_come_to_is_interrupted(rank: int) -> None:
    key, interrupt = uuid.uuid4().hex, Interrupt()
    made: dict[int, LocalRendezvous] = {}

    def make(number: int) -> None:
        made[number] = LocalRendezvous(
            rank=number,
            world_size=2,
            key=key,
            secret=b"s",
            timeout=LONG,
            interrupt=interrupt if number == rank else None,
        )

    other = threading.Thread(target=make, args=(1 - rank,))
    other.start()
    make(rank)
    other.join()
    timer = threading.Timer(0.1, interrupt.set, ["the generation has ended"])
    timer.start()
    with pytest.raises(PeerLostError, match="the generation has ended"):
        made[rank].allgather(b"x", timeout=LONG)
    timer.join()
    for rendezvous in made.values():
        rendezvous.close()
    interrupt.close()
    interrupt.set("too late")  # of no use, and no error
