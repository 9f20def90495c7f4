"""The coordinator: keeps track of hosts, the current generation of the world, and the meetings of its ranks. Pure.

Every message of a rank carries the *generation* that it believes in. When the world changes, the coordinator begins
the next one, and from then on refuses what still comes from an older: a process that was cut off and comes back
cannot take part in a world that has gone on without it.

An agent speaks for its host. It is lost when its connection ends, or when nothing came from it for longer than the
heartbeat; both ends watch each other in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

from typing_extensions import override

from unidist.control.codec import Message, unexpected
from unidist.control.meeting import Meeting, refusal
from unidist.control.messages import Beat, Failed, Give, GiveUp, Goodbye, HostFacts, LeaveMeeting, RankHere
from unidist.control.service import Action, Drop, Publish, Send, Service

BEATS_PER_LIMIT = 5
"""Number of heartbeats that each end sends within the heartbeat limit."""

SILENCE_PER_HEARTBEAT = 2.0
"""A worker, or a process beside the ranks, may be silent for so many heartbeat limits, longer than its host: Python's
lock may be held for seconds by honest work."""


@dataclass(frozen=True)
class HostJoined:
    """The agent of a host has connected; `facts` describe the host."""

    host: int
    facts: HostFacts


@dataclass(frozen=True)
class HostMessage:
    """The agent of a host sent a message that is not for the coordinator itself."""

    host: int
    message: Message


@dataclass(frozen=True)
class HostLost:
    """The connection to a host's agent was lost, without a goodbye."""

    host: int
    reason: str


@dataclass
class _Agent:
    host: int
    heard: float
    beat: float


class Coordinator(Service):
    """Decides for one job; publishes `HostJoined`, `HostMessage` and `HostLost`.

    Args:
        num_hosts: number of agents that may come.
        world_size: number of ranks of the first generation.
        heartbeat: an agent from which nothing comes for longer is lost.
        agents: index of the agent by rank, where there is not one for each host; default: a rank's node rank.
    """

    def __init__(
        self, *, num_hosts: int, world_size: int, heartbeat: timedelta, agents: Mapping[int, int] | None = None
    ) -> None:
        self.generation = 0
        """The generation that counts."""
        self._num_hosts = num_hosts
        self._agent_of = agents or {}
        self._world_size = world_size
        self._limit = heartbeat.total_seconds()
        self._agents: dict[int, _Agent] = {}  # by peer
        self._peer_of_host: dict[int, int] = {}
        self._gone: set[int] = set()
        self._ranks: dict[int, RankHere] = {}
        self._refused: set[int] = set()
        self._meetings: dict[int, Meeting] = {}

    @property
    def num_agents(self) -> int:
        """How many agents are there. From any thread."""
        return len(self._agents)

    @property
    def num_expected(self) -> int:
        """How many agents may come, or have come."""
        return self._num_hosts

    # What the launcher asks for, in the server's thread.

    def tell(self, message: Message, hosts: Iterable[int] | None = None) -> Iterator[Action]:
        """Send a message to the agents of `hosts` (default: all that are there)."""
        if hosts is None:
            peers = list(self._agents)
        else:
            peers = [self._peer_of_host[host] for host in dict.fromkeys(hosts) if host in self._peer_of_host]
        for peer in peers:
            yield Send(peer, message)

    def begin_generation(self, world_size: int) -> Iterator[Action]:
        """Begin the next generation: meetings of the old one fail, and the ranks in them are told."""
        ended = self.generation
        for meeting in self._meetings.values():
            yield from meeting.fail("PeerLostError", f"generation {ended} of this job has ended", ())
        self._meetings.clear()
        self.generation += 1
        self._world_size = world_size

    # What comes in.

    @override
    def received(self, peer: int, message: Message, now: float) -> Iterator[Action]:
        if peer in self._agents:
            self._agents[peer].heard = now
            if isinstance(message, Goodbye):
                self._gone.add(self._remove_agent(peer))
            elif not isinstance(message, Beat):
                yield Publish(HostMessage(self._agents[peer].host, message))
        elif isinstance(message, HostFacts):
            yield from self._welcome_agent(peer, message, now)
        elif isinstance(message, RankHere):
            yield from self._welcome_rank(peer, message)
        elif peer in self._ranks:
            yield from self._serve(peer, self._ranks[peer], message)
        elif isinstance(message, LeaveMeeting) or peer in self._refused:
            return  # it had no place, and has been told, or has left
        else:
            yield Drop(peer, f"sent {message.type_name!r} before it said who it is")

    @override
    def lost(self, peer: int, reason: str, now: float) -> Iterator[Action]:
        if peer in self._agents:
            yield from self._lose_host(peer, f"its connection ended ({reason})")
        elif peer in self._ranks:
            yield from self._lose_rank(peer, reason)
        self._refused.discard(peer)

    @override
    def stood_still(self, seconds: float, now: float) -> None:
        for agent in self._agents.values():
            agent.heard = min(now, agent.heard + seconds)

    @override
    def tick(self, now: float) -> Iterator[Action]:
        for peer, agent in list(self._agents.items()):
            silent = now - agent.heard
            if silent > self._limit:
                yield from self._lose_host(peer, f"nothing was heard of it for {silent:.1f} seconds")
                yield Drop(peer, f"no heartbeat for {silent:.1f} seconds")
            elif now - agent.beat >= self._limit / BEATS_PER_LIMIT:
                agent.beat = now
                yield Send(peer, Beat())

    def _welcome_agent(self, peer: int, facts: HostFacts, now: float) -> Iterator[Action]:
        host = facts.host
        if not 0 <= host < self._num_hosts or host in self._gone or host in self._peer_of_host:
            yield Send(peer, refusal(f"host {host} is not awaited, or has come before"))
            yield Drop(peer, f"agent of host {host}, which is not awaited")
            return
        self._agents[peer] = _Agent(host, heard=now, beat=now)
        self._peer_of_host[host] = peer
        yield Publish(HostJoined(host, facts))

    def _remove_agent(self, peer: int) -> int:
        """Take an agent out of the tables; returns its host."""
        host = self._agents.pop(peer).host
        del self._peer_of_host[host]
        return host

    def _lose_host(self, peer: int, reason: str) -> Iterator[Action]:
        host = self._remove_agent(peer)
        self._gone.add(host)
        yield Publish(HostLost(host, reason))
        for each in [
            each for each, rank in self._ranks.items() if self._agent_of.get(rank.rank, rank.node_rank) == host
        ]:
            yield from self._lose_rank(each, f"its host was lost: {reason}")

    def _welcome_rank(self, peer: int, rank: RankHere) -> Iterator[Action]:
        if rank.generation != self.generation:
            yield from self._refuse(peer, self._stale(rank))
            return
        world_size = rank.world_size
        if world_size != self._world_size or not 0 <= rank.rank < world_size:
            text = f"rank {rank.rank} of {world_size} has no place in this job of {self._world_size} ranks"
            yield from self._refuse(peer, refusal(text))
            return
        meeting = self._meetings.setdefault(rank.epoch, Meeting(world_size))
        if meeting.has(rank.rank):
            text = f"rank {rank.rank} is there already: another process has the same rank"
            yield from self._refuse(peer, refusal(text))
            return
        self._ranks[peer] = rank
        meeting.join(rank.rank, peer)

    def _refuse(self, peer: int, message: Message) -> Iterator[Action]:
        """Tell a rank that it has no place. The first payload, which follows its introduction, is ignored then."""
        self._refused.add(peer)
        yield Send(peer, message)

    def _serve(self, peer: int, rank: RankHere, message: Message) -> Iterator[Action]:
        if not isinstance(message, (Give, GiveUp, LeaveMeeting)):
            raise unexpected(message)
        if isinstance(message, LeaveMeeting):
            del self._ranks[peer]
        if message.generation != self.generation or rank.generation != self.generation:
            if not isinstance(message, LeaveMeeting):
                yield Send(peer, self._stale(rank))
            return
        meeting = self._meetings[rank.epoch]
        match message:
            case Give():
                yield from meeting.give(rank.rank, message.round, message.payload)
            case GiveUp():
                yield from meeting.give_up(rank.rank, message.round)
            case LeaveMeeting():
                meeting.leave(rank.rank)
                if meeting.is_over:
                    del self._meetings[rank.epoch]

    def _lose_rank(self, peer: int, reason: str) -> Iterator[Action]:
        rank = self._ranks.pop(peer)
        meeting = self._meetings.get(rank.epoch)
        if rank.generation == self.generation and meeting is not None:
            yield from meeting.lose(rank.rank, reason)

    def _stale(self, rank: RankHere) -> Failed:
        text = (
            f"rank {rank.rank} belongs to generation {rank.generation} of this job, which is at {self.generation}: it "
            "was taken for lost, and the others have gone on without it"
        )
        return Failed("PeerLostError", text, (rank.rank,))
