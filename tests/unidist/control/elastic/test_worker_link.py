"""A worker's link to a coordinator that dies and comes back: over real sockets, behind the script's back."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from unidist.control.elastic.coordinator import ElasticCoordinator
from unidist.control.elastic.membership import NO_STATE, Membership
from unidist.control.elastic.resumable_coordinator import ResumableCoordinator, Snapshot
from unidist.control.elastic.worker_link import WorkerLink
from unidist.control.server import ControlServer
from unidist.errors import ConfigurationError, PeerLostError

pytestmark = pytest.mark.usefixtures("leak_check")

SECRET = b"s" * 32
LONG = timedelta(seconds=60)


class Launcher:
    """The coordinator of a job of one worker, and its server, which can be killed and started again."""

    def __init__(self) -> None:
        self.coordinator = self._coordinator()
        self.coordinator.membership.expect(0, 0)
        self.server = ControlServer(self.coordinator, SECRET, host="127.0.0.1")
        self.server.start()

    def die(self) -> Snapshot:
        """End without a word; returns what was kept."""
        kept = self.coordinator.snapshot()
        self.server.close()
        return kept

    def come_back(self, kept: Snapshot) -> None:
        """Take the same port again."""
        self.coordinator = self._coordinator()
        self.coordinator.restore(kept, now=0.0)
        port = self.server.port
        self.server = ControlServer(self.coordinator, SECRET, host="127.0.0.1", port=port)
        self.server.start()

    def call(self, function: Any) -> None:
        """Do something in the server's thread, and wait for it."""
        done = threading.Event()

        def act() -> Iterable[Any]:
            done.set()
            return list(function())

        self.server.call(act)
        assert done.wait(30)

    def _coordinator(self) -> ResumableCoordinator:
        return ResumableCoordinator(
            Membership(num_first=1, min_num=1, max_num=2),
            heartbeat=timedelta(seconds=30),
            silence=timedelta(seconds=60),
            patience=timedelta(days=1000),
        )


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.server.close()


def link(launcher: Launcher, ended: list[str] | None = None, *, orphan: timedelta = LONG) -> WorkerLink:
    heard = [] if ended is None else ended
    address = ("127.0.0.1", launcher.server.port)
    return WorkerLink(address, SECRET, 0, timeout=LONG, on_ended=heard.append, orphan_timeout=orphan)


def test_a_member_notices_nothing_of_a_coordinator_that_comes_back(launcher: Launcher) -> None:
    ended: list[str] = []
    mine = link(launcher, ended)
    try:
        assert mine.next_world(NO_STATE, reason="", timeout=LONG).generation == 0
        launcher.come_back(launcher.die())
        mine.check()
        launcher.call(lambda: launcher.coordinator.expect_worker(1, 0))
        # The answer comes by the new connection, from the new coordinator.
        assert mine.next_world(4, reason="", timeout=LONG).generation == 1
        assert ended == []
    finally:
        mine.close()


def test_who_waits_for_a_world_waits_on_and_gets_its_place_from_the_next_coordinator(launcher: Launcher) -> None:
    mine = link(launcher)
    kept = launcher.die()
    found: list[int] = []
    waiting = threading.Thread(
        target=lambda: found.append(mine.next_world(NO_STATE, reason="", timeout=LONG).generation)
    )
    waiting.start()
    try:
        launcher.come_back(kept)
        waiting.join(60)
        assert found == [0]
    finally:
        mine.close()
        waiting.join(60)


def test_who_stands_by_waits_for_longer_than_its_timeout(launcher: Launcher) -> None:
    member = link(launcher)
    member.next_world(NO_STATE, reason="", timeout=LONG)
    launcher.call(lambda: launcher.coordinator.limit_host(0, 1))
    launcher.call(lambda: launcher.coordinator.expect_worker(1, 0))
    address = ("127.0.0.1", launcher.server.port)
    spare = WorkerLink(address, SECRET, 1, timeout=LONG, on_ended=lambda text: None)
    timeout, found = timedelta(seconds=2), []  # in which it has to hear that it stands by
    waiting = threading.Thread(
        target=lambda: found.append(spare.next_world(NO_STATE, reason="", timeout=timeout).topology.world_size)
    )
    waiting.start()
    try:
        waiting.join(timeout.total_seconds() + 0.5)
        assert waiting.is_alive()
        member.forget()  # as if it had died
        waiting.join(60)
        assert found == [1]
    finally:
        spare.close()
        waiting.join(60)


def test_a_coordinator_that_does_not_come_back_is_lost_in_the_end(launcher: Launcher) -> None:
    ended: list[str] = []
    mine = link(launcher, ended, orphan=timedelta(seconds=0.3))
    try:
        mine.next_world(NO_STATE, reason="", timeout=LONG)
        launcher.die()
        with pytest.raises(PeerLostError, match=r"did not find it for 0\.3 seconds"):
            mine.next_world(1, reason="", timeout=LONG)
        assert len(ended) == 1
    finally:
        mine.close()


def test_without_a_timeout_for_orphans_a_lost_coordinator_is_lost_at_once(launcher: Launcher) -> None:
    mine = link(launcher, orphan=timedelta(0))
    try:
        mine.next_world(NO_STATE, reason="", timeout=LONG)
        launcher.come_back(launcher.die())
        with pytest.raises(PeerLostError, match="lost the job's coordinator"):
            mine.next_world(1, reason="", timeout=LONG)
    finally:
        mine.close()


def test_a_worker_that_the_next_coordinator_does_not_know_ends(launcher: Launcher) -> None:
    ended: list[str] = []
    mine = link(launcher, ended)
    try:
        mine.next_world(NO_STATE, reason="", timeout=LONG)
        kept = launcher.die()
        kept["membership"]["workers"].clear()
        launcher.come_back(kept)
        with pytest.raises((PeerLostError, ConfigurationError), match="is not awaited"):
            mine.next_world(1, reason="", timeout=LONG)
        assert len(ended) == 1
    finally:
        mine.close()


def test_a_worker_that_is_refused_at_its_first_word_does_not_come_again() -> None:
    coordinator = ElasticCoordinator(Membership(num_first=1, min_num=1, max_num=1), heartbeat=LONG, silence=LONG)
    with ControlServer(coordinator, SECRET, host="127.0.0.1") as server:
        address = ("127.0.0.1", server.port)
        with pytest.raises(ConfigurationError, match="is not awaited"):
            WorkerLink(address, SECRET, 7, timeout=LONG, on_ended=lambda text: None, orphan_timeout=LONG)


def test_closing_does_not_wait_for_a_coordinator_that_is_away(launcher: Launcher) -> None:
    mine = link(launcher, orphan=timedelta(hours=1))
    mine.next_world(NO_STATE, reason="", timeout=LONG)
    launcher.die()
    mine.close()
    assert not mine._thread.is_alive()
