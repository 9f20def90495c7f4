"""Choosing the engine: the one asked for or a clear error, else the best that can."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta

import pytest

from unidist.communicator import Communicator
from unidist.engine import Availability, Engine, EngineSpec
from unidist.engines.choice import check_same, choose, meeting_place
from unidist.engines.single import SingleCommunicator
from unidist.errors import ConfigurationError
from unidist.registry import Registry
from unidist.rendezvous import Contribution, MeetingPlace, Rendezvous
from unidist.settings.placement import Placement
from unidist.topology import Topology

TWO = Topology(0, 2, 0, 2)
HOST, CUDA = frozenset(("host",)), frozenset(("cuda",))


class Good(Engine):
    def availability(self) -> Availability:
        return Availability(True, "built in")

    def supports(self, topology: Topology) -> Availability:
        return Availability(True)

    def connect(self, topology: Topology, rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        return SingleCommunicator()


class Broken(Good):
    def availability(self) -> Availability:
        return Availability(False, "its library is missing")


class OneRankOnly(Good):
    def supports(self, topology: Topology) -> Availability:
        return Availability(topology.world_size == 1, "connects one process")


def registry(**engines: tuple[type[Engine], int] | tuple[type[Engine], int, frozenset[str]]) -> Registry[EngineSpec]:
    class Spec(EngineSpec):
        def load(self) -> Engine:
            return engines[self.name][0]()

    found: Registry[EngineSpec] = Registry("engine")
    for name, (_, priority, *kinds) in engines.items():
        found.add(Spec(name, "not:used", name, memory_kinds=kinds[0] if kinds else HOST, priority=priority))
    return found


def test_auto_takes_the_usable_engine_with_the_highest_priority() -> None:
    engines = registry(low=(Good, 1), high=(Good, 9), middle=(Good, 5))
    choice = choose("auto", "host", TWO, engines)
    assert choice.spec.name == "high"
    assert "2 rank(s) on 1 host(s)" in choice.reason


def test_auto_passes_over_what_cannot_be_used_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    choice = choose("auto", "host", TWO, registry(broken=(Broken, 9), alone=(OneRankOnly, 8), good=(Good, 1)))
    assert choice.spec.name == "good"
    with caplog.at_level(logging.INFO, logger="unidist.engine"):
        choice.tell()
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["engine good is used instead of broken (its library is missing)"]


def test_auto_never_takes_an_engine_of_negative_priority() -> None:
    with pytest.raises(ConfigurationError, match="no engine moves host memory"):
        choose("auto", "host", TWO, registry(hidden=(Good, -1)))
    assert choose("hidden", "host", TWO, registry(hidden=(Good, -1))).reason == "asked for"


def test_an_elastic_job_takes_an_engine_that_connects_anew() -> None:
    engines = registry(best=(Good, 9))
    engines.add(replace(next(iter(engines)), name="lasting", priority=1, re_forms=True))
    assert choose("auto", "host", TWO, engines).spec.name == "best"
    with pytest.raises(ConfigurationError, match=r"'best' cannot reconnect the ranks .* those that can: lasting"):
        choose("best", "host", TWO, engines, elastic=True)
    without = registry(best=(Good, 9))
    with pytest.raises(ConfigurationError, match=r"best \(it cannot reconnect when a rank is lost\)"):
        choose("auto", "host", TWO, without, elastic=True)


def test_with_tls_an_engine_between_hosts_has_to_encrypt() -> None:
    engines: Registry[EngineSpec] = Registry("engine")
    for spec in registry(open=(Good, 9), closed=(Good, 1)):
        engines.add(replace(spec, encrypts=spec.name == "closed"))
    apart = Topology(world_size=2, local_size=1, num_nodes=2)
    assert choose("auto", "host", apart, engines).spec.name == "open"
    assert choose("auto", "host", apart, engines, tls=True).spec.name == "closed"
    assert choose("auto", "host", TWO, engines, tls=True).spec.name == "open", "nothing leaves the host"
    with pytest.raises(ConfigurationError, match=r"'open' does not encrypt .* those that do: closed\. Leave --engine"):
        choose("open", "host", apart, engines, tls=True)
    with pytest.raises(ConfigurationError, match=r"open \(it does not encrypt, as --tls asks for\)"):
        choose("auto", "host", apart, registry(open=(Good, 9)), tls=True)


def test_without_any_engine_every_reason_is_told() -> None:
    with pytest.raises(ConfigurationError, match=r"alone \(connects one process\); broken \(its library is missing\)"):
        choose("auto", "host", TWO, registry(broken=(Broken, 9), alone=(OneRankOnly, 8)))


@pytest.mark.parametrize(
    ("engine", "reason"), [(Broken, "its library is missing"), (OneRankOnly, "connects one process")]
)
def test_an_engine_asked_for_that_cannot_be_used_is_an_error_and_no_fallback(engine: type[Engine], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'wanted' was asked for, but cannot be used: {reason}"):
        choose("wanted", "host", TWO, registry(wanted=(engine, 1), good=(Good, 9)))


def test_an_unknown_engine_lists_the_choices_and_suggests_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown engine 'shn'. Did you mean 'shm'\? Choices: gloo, shm"):
        choose("shn", "host", TWO, registry(shm=(Good, 1), gloo=(Good, 2)))


def test_an_engine_asked_for_that_does_not_move_the_memory_leaves_it_to_auto() -> None:
    engines = registry(nccl=(Good, 60, CUDA), shm=(Good, 50))
    assert choose("nccl", "cuda", TWO, engines).spec.name == "nccl"
    assert choose("nccl", "host", TWO, engines).spec.name == "shm"


@pytest.mark.parametrize(
    ("engine", "reason"), [(Broken, "its library is missing"), (OneRankOnly, "connects one process")]
)
def test_host_memory_needs_an_engine_asked_for_that_can_be_used_too(engine: type[Engine], reason: str) -> None:
    engines = registry(nccl=(engine, 60, CUDA), shm=(Good, 50))
    with pytest.raises(ConfigurationError, match=f"'nccl' was asked for, but cannot be used: {reason}"):
        choose("nccl", "host", TWO, engines)


class Replies(Rendezvous):
    """A rendezvous at which the other rank says something fixed."""

    def __init__(self, other: bytes) -> None:
        self._other = other

    def allgather(self, payload: bytes, *, fds: object = (), timeout: timedelta) -> list[Contribution]:
        return [Contribution(payload), Contribution(self._other)]

    def close(self) -> None:
        """Nothing to close."""


def test_ranks_that_chose_differently_are_told_who_chose_what() -> None:
    choice = choose("auto", "host", TWO, registry(shm=(Good, 1)))
    check_same(choice, Replies(b"shm"), TWO, timedelta(seconds=1))
    with pytest.raises(ConfigurationError, match="rank 0: shm, rank 1: gloo"):
        check_same(choice, Replies(b"gloo"), TWO, timedelta(seconds=1))


def test_several_hosts_need_a_launcher_that_gives_them_a_place_to_meet() -> None:
    two_hosts = Topology(0, 4, 0, 2, 0, 2)
    place = MeetingPlace(("10.0.0.1", 77), "10.0.0.2")
    assert meeting_place(Placement(two_hosts, "unidist", meeting_place=place)) == place
    with pytest.raises(ConfigurationError, match=r"4 ranks, 2 of them here, and was started by torchrun.*-H"):
        meeting_place(Placement(two_hosts, "torchrun"))
