"""What the coordinator decides: no socket, no thread, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import pytest

from unidist.control.codec import Message
from unidist.control.coordinator import Coordinator, HostJoined, HostLost, HostMessage
from unidist.control.messages import Beat, Exits, Gathered, Give, GiveUp, Goodbye, HostFacts, LeaveMeeting, RankHere
from unidist.control.service import Action, Drop, Publish, Send


def host_facts(host: int, *, cores: int = 1) -> HostFacts:
    """Return the first message of the agent of a host."""
    return HostFacts(host, f"h{host}", f"10.0.0.{host}", "10.0.0.9", 1, (), "", 0, cores, pid=7)


class Desk:
    """A coordinator and what it did: messages by peer, events, drops."""

    def __init__(
        self,
        *,
        num_hosts: int = 2,
        world_size: int = 2,
        heartbeat: float = 5.0,
        agents: Mapping[int, int] | None = None,
    ) -> None:
        self.coordinator = Coordinator(
            num_hosts=num_hosts, world_size=world_size, heartbeat=timedelta(seconds=heartbeat), agents=agents
        )
        self.sent: dict[int, list[Any]] = {}
        self.events: list[object] = []
        self.dropped: list[int] = []
        self.now = 0.0

    def say(self, peer: int, message: Message) -> list[Any]:
        """Let a peer say something; returns what it is told at once."""
        before = len(self.sent.get(peer, []))
        self.do(self.coordinator.received(peer, message, self.now))
        return self.sent.get(peer, [])[before:]

    def come(self, rank: int, *, peer: int | None = None, epoch: int = 0, generation: int = 0, size: int = 2) -> Any:
        """Let a rank come, by the connection of its own number if not told otherwise."""
        return self.say(rank if peer is None else peer, RankHere(generation, epoch, rank, rank % 2, size))

    def give(self, rank: int, payload: str, *, number: int = 0, generation: int = 0) -> Any:
        return self.say(rank, Give(round=number, payload=payload, generation=generation))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.coordinator.tick(self.now))

    def stand_still(self, seconds: float) -> None:
        self.now += seconds
        self.coordinator.stood_still(seconds, self.now)
        self.do(self.coordinator.tick(self.now))

    def lose(self, peer: int) -> None:
        self.do(self.coordinator.lost(peer, "gone", self.now))

    def do(self, actions: Iterable[Action]) -> None:
        for action in list(actions):
            if isinstance(action, Send):
                self.sent.setdefault(action.peer, []).append(action.message)
            elif isinstance(action, Publish):
                self.events.append(action.event)
            elif isinstance(action, Drop):
                self.dropped.append(action.peer)


def last(desk: Desk, peer: int) -> Any:
    return desk.sent[peer][-1]


def test_every_rank_gets_what_all_gave_in_rank_order() -> None:
    desk = Desk(world_size=3)
    for rank in (2, 0, 1):
        assert desk.come(rank, size=3) == []
    for turn in range(2):
        for rank in (1, 2, 0):
            desk.give(rank, f"{rank}/{turn}", number=turn)
        for rank in range(3):
            assert last(desk, rank) == Gathered(turn, tuple((f"{each}/{turn}", 1) for each in range(3)))


def test_inits_of_one_process_do_not_mix() -> None:
    desk = Desk()
    desk.come(0, peer=10, epoch=0)
    desk.come(1, peer=11, epoch=1)
    desk.say(10, Give(round=0, payload="a", generation=0))
    desk.say(11, Give(round=0, payload="b", generation=0))
    assert not desk.sent.get(10)
    assert not desk.sent.get(11)


def test_missing_ranks_are_named_to_all_that_came_and_to_those_that_come_later() -> None:
    desk = Desk(world_size=4)
    for rank in (0, 2):
        desk.come(rank, size=4)
        desk.give(rank, "")
    desk.say(2, GiveUp(round=0, generation=0))
    for rank in (0, 2):
        assert last(desk, rank).kind == "StalledError"
        assert last(desk, rank).ranks == (1, 3)
        assert "ranks 1, 3 of 4 did not come" in last(desk, rank).text
    assert desk.come(1, size=4) == []
    desk.give(1, "")
    assert last(desk, 1).kind == "StalledError"


def test_a_rank_that_came_but_does_not_answer_is_named() -> None:
    desk = Desk()
    desk.come(0), desk.come(1)
    desk.give(0, "")
    desk.say(0, GiveUp(round=0, generation=0))
    assert last(desk, 0).ranks == (1,)
    assert "did not answer" in last(desk, 0).text


def test_giving_up_on_what_is_complete_changes_nothing() -> None:
    desk = Desk()
    for rank in (0, 1):
        desk.come(rank)
        desk.give(rank, "")
    assert desk.say(0, GiveUp(round=0, generation=0)) == []


def test_a_rank_that_dies_is_named_to_the_others_and_one_that_left_is_not() -> None:
    desk = Desk(world_size=3)
    for rank in range(3):
        desk.come(rank, size=3)
    desk.say(2, LeaveMeeting(generation=0))
    desk.give(0, "")
    desk.lose(2)
    assert not desk.sent.get(0)
    desk.lose(1)
    assert last(desk, 0).kind == "PeerLostError"
    assert last(desk, 0).ranks == (1,)
    assert not desk.sent.get(2)


def test_a_rank_that_waits_for_nothing_hears_of_a_loss_when_it_gives() -> None:
    desk = Desk(world_size=3)
    for rank in range(3):
        desk.come(rank, size=3)
    for rank in range(3):
        desk.give(rank, "")
    desk.give(0, "", number=1)
    desk.lose(2)
    assert last(desk, 0).kind == "PeerLostError"
    assert isinstance(last(desk, 1), Gathered)
    desk.give(1, "", number=1)
    assert last(desk, 1).kind == "PeerLostError"
    assert last(desk, 1).ranks == (2,)


@pytest.mark.parametrize(("rank", "size", "reason"), [(0, 2, "there already"), (2, 2, "no place"), (1, 3, "no place")])
def test_a_process_without_a_place_is_told_so(rank: int, size: int, reason: str) -> None:
    desk = Desk()
    desk.come(0)
    reply = desk.come(rank, peer=99, size=size)
    assert reply[-1].kind == "ConfigurationError"
    assert reason in reply[-1].text


def test_who_does_not_say_who_it_is_is_dropped() -> None:
    desk = Desk()
    desk.say(5, Give(round=0, payload="", generation=0))
    assert desk.dropped == [5]


def test_agents_come_speak_and_leave() -> None:
    desk = Desk()
    desk.say(7, host_facts(1, cores=4))
    desk.say(7, Exits(((0, 70, 1),)))
    desk.say(7, Goodbye())
    desk.lose(7)
    came, said = desk.events
    assert isinstance(came, HostJoined)
    assert (came.host, came.facts.cores) == (1, 4)
    assert said == HostMessage(1, Exits(((0, 70, 1),)))


def test_an_agent_that_is_not_awaited_is_dropped() -> None:
    desk = Desk()
    desk.say(7, host_facts(1))
    for peer, host in ((8, 1), (9, 2), (10, -1)):
        desk.say(peer, host_facts(host))
    assert desk.dropped == [8, 9, 10]
    desk.lose(7)
    desk.say(11, host_facts(1))  # back from a partition: too late
    assert desk.dropped[-1] == 11


def test_a_silent_agent_is_lost_after_the_heartbeat_and_its_ranks_with_it() -> None:
    desk = Desk(heartbeat=5.0)
    desk.say(7, host_facts(0))
    desk.say(8, host_facts(1))
    desk.come(0), desk.come(1)
    desk.give(0, "")
    for _ in range(10):
        desk.pass_time(1.0)
        desk.say(7, Beat())
    lost = [event for event in desk.events if isinstance(event, HostLost)]
    assert [event.host for event in lost] == [1]
    assert "nothing was heard" in lost[0].reason
    assert desk.dropped == [8]
    assert last(desk, 0).ranks == (1,)


def test_the_silence_of_others_while_the_server_stood_still_does_not_count() -> None:
    desk = Desk(heartbeat=5.0)
    desk.say(7, host_facts(0))
    desk.pass_time(3.0)
    desk.stand_still(60.0)
    assert not [event for event in desk.events if isinstance(event, HostLost)]
    desk.pass_time(3.0)
    assert [event.host for event in desk.events if isinstance(event, HostLost)] == [0]


def test_an_agent_of_one_rank_takes_that_rank_with_it_and_no_other_of_its_host() -> None:
    desk = Desk(agents={0: 0, 1: 1, 2: 2, 3: 3}, num_hosts=4, world_size=4)
    for agent in range(4):
        desk.say(70 + agent, host_facts(agent))
    for rank in range(4):
        desk.come(rank, size=4)  # their node ranks are 0, 1, 0, 1
    desk.give(1, "")
    desk.lose(70 + 2)
    assert last(desk, 1).ranks == (2,)


def test_agents_hear_beats_often_enough() -> None:
    desk = Desk(heartbeat=5.0)
    desk.say(7, host_facts(0))
    for _ in range(40):
        desk.pass_time(0.1)
    assert len([message for message in desk.sent[7] if isinstance(message, Beat)]) in (3, 4)


def test_a_new_generation_ends_the_meetings_of_the_old_one_and_hears_it_no_more() -> None:
    desk = Desk()
    desk.come(0), desk.come(1)
    desk.give(0, "old")
    desk.do(desk.coordinator.begin_generation(world_size=2))
    assert last(desk, 0).kind == "PeerLostError"
    assert "generation 0 of this job has ended" in last(desk, 0).text
    # Rank 1 was cut off meanwhile and knows nothing of it.
    assert "belongs to generation 0 of this job, which is at 1" in desk.give(1, "stale")[-1].text
    # The new ranks meet as if it had never been, though it goes on talking.
    for rank, peer in ((0, 20), (1, 21)):
        assert desk.come(rank, peer=peer, generation=1) == []
        desk.give(1, "stale")
        desk.say(peer, Give(round=0, payload=f"new {rank}", generation=1))
    assert last(desk, 20).runs == (("new 0", 1), ("new 1", 1))
    desk.lose(1)
    assert isinstance(last(desk, 20), Gathered)


def test_a_process_of_an_old_generation_cannot_come_later_nor_claim_the_new_one() -> None:
    desk = Desk()
    desk.come(1)
    desk.do(desk.coordinator.begin_generation(world_size=1))
    assert desk.come(0, peer=9, generation=0)[-1].kind == "PeerLostError"
    assert desk.give(1, "x", generation=1)[-1].kind == "PeerLostError"


def test_what_ranks_in_a_row_gave_alike_is_sent_once() -> None:
    desk = Desk(world_size=4)
    for rank in range(4):
        desk.come(rank, size=4)
        desk.give(rank, "other" if rank == 2 else "same")
    assert last(desk, 3).runs == (("same", 2), ("other", 1), ("same", 1))


def test_what_all_gave_must_fit_into_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    from unidist.control import meeting

    monkeypatch.setattr(meeting, "MAX_FRAME_BYTES", 20)
    desk = Desk()
    for rank in (0, 1):
        desk.come(rank)
        desk.give(rank, f"{rank}" * 6)
    assert last(desk, 0).kind == "ConfigurationError"
