"""The coordinator of an elastic job, which also decides who is a member of the world. Pure.

Messages of a worker, and messages to it:

    worker -> coordinator   worker     its number: here I am                     -> welcome
                            ready      I wait for the next world                 -> assign, or dismissed
                            beat       I am alive, and so far
                            leaving    I was asked to end (SIGTERM): please let me go at the next commit
                            detached   I have left the world in good order
                            give_up    what the members held is lost: end the job
                            happened   for the job's log: a checkpoint was made, or loaded
    coordinator -> worker   standby    there is no room for you now: wait as long as it takes
                            change     come back (`ready`) at your next commit: others come, or go
                            ended      your generation has ended: stop what you do, restore, come back

A worker is lost when its connection ends, when its host is lost, when its process ends, or when nothing was heard of it
for longer than the limit. Whichever is seen first counts: the generation ends, and the others are told at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from typing_extensions import override

from unidist.control.coordinator import BEATS_PER_LIMIT, Coordinator
from unidist.control.elastic.membership import NO_STATE, Membership, Phase, Worker
from unidist.control.meeting import refusal
from unidist.control.service import Action, Drop, Publish, Send
from unidist.control.wire import Message

WORKER_EVENTS = frozenset({"checkpoint", "checkpoint_loaded"})
"""Kinds of events that workers may add to the job's log."""

MAX_BEATS_PER_SEC = 500
"""All workers together send about so many heartbeats: each one costs the launcher the same."""

FEWEST_BEATS_PER_LIMIT = 3
"""But a worker sends so many within the time after which it is taken for lost."""


@dataclass(frozen=True)
class JobEvent:
    """An event for the job's log.

    Args:
        kind: "joined", "lost", "generation", "ended", "left", "hung", "finished", "change", "short", "standby".
        fields: of the event; plain data.
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Beat:
    """A worker is alive; its heartbeat reports its step times.

    Args:
        worker: its number.
        num_commits: how many it has made since it was started.
        step_times: fields of `unidist.control.elastic.step_times.StepTimeReport`; what the worker says, unchecked.
    """

    worker: int
    num_commits: int
    step_times: Message


@dataclass
class _Link:
    """The state of a worker's connection."""

    worker: int
    heard: float
    steps: int = 0


class ElasticCoordinator(Coordinator):
    """Decides for one elastic job; publishes `JobEvent` and `Beat` beside what `Coordinator` publishes.

    Args:
        membership: the rules of the world's size.
        heartbeat: a host from which nothing comes for longer is lost.
        silence: a worker from which nothing comes for longer hangs, and is taken for lost.
        stall: a world in which no worker has taken a step for longer has ended; None: it may wait for ever.
    """

    def __init__(
        self, membership: Membership, *, heartbeat: timedelta, silence: timedelta, stall: timedelta | None = None
    ) -> None:
        super().__init__(num_hosts=0, world_size=0, heartbeat=heartbeat)
        self.membership = membership
        self._silence = silence.total_seconds()
        self._stall = None if stall is None else stall.total_seconds()
        self._links: dict[int, _Link] = {}  # by peer
        self._peers: dict[int, int] = {}  # by worker
        self._dismissed: set[int] = set()
        self._standing_by: set[int] = set()  # workers that were told so
        self._last_over: tuple[list[Worker], int] = ([], 0)
        self._has_world = False
        self._was_lost = False
        self._change_told = False
        self._leaving_told: set[int] = set()
        self._stepped = 0.0
        self._steps = 0
        self._is_short = False

    # What the launcher asks for, in the server's thread.

    def expect_hosts(self, number: int) -> Iterator[Action]:
        """Await agents with indices below `number`, each once; before they are started."""
        self._num_hosts = number
        yield from ()

    def limit_host(self, host: int, room: int) -> Iterator[Action]:
        """Let no worker join a world that has this many on its host; more workers there stand by."""
        self.membership.limit_host(host, room)
        yield from ()

    def expect_worker(self, number: int, host: int) -> Iterator[Action]:
        """Await a worker that is about to be started."""
        self.membership.expect(number, host)
        yield Publish(JobEvent("started", {"worker": number, "host": host}))

    def end_worker(self, number: int, reason: str, *, now: float, succeeded: bool) -> Iterator[Action]:
        """A worker's process has ended."""
        worker = self.membership.remove(number)
        self._forget(number)
        if succeeded:
            self.membership.is_finishing = True
            yield Publish(JobEvent("finished", {"worker": number}))
        if worker is None:
            return
        has_failed = worker.phase is Phase.DETACHED and not succeeded
        if worker.rank is not None and (worker.phase is Phase.MEMBER or has_failed):  # else it was in no world
            yield from self._lose(worker, reason)
        yield from self._advance(now)

    def process_ended(self, number: int, *, now: float) -> Iterator[Action]:
        """A worker's process has ended; how, is not known yet. A child of it may still hold its connection open."""
        worker = self.membership.workers.get(number)
        if worker is not None and worker.phase is not Phase.DETACHED:
            peer = self._forget(number)
            self.membership.remove(number)
            if worker.phase is Phase.MEMBER:
                yield from self._lose(worker, "its process ended")
            if peer is not None:
                yield Drop(peer, "its process ended")
            yield from self._advance(now)

    def retire(self, number: int, *, now: float) -> Iterator[Action]:
        """Let a worker go at the next commit; one that is in no world goes at once."""
        self.membership.leave(number)
        yield from self._advance(now)

    def leave_out_host(self, host: int, reason: str) -> Iterator[Action]:
        """Go on without a host whose agent is there, but is of no use: it ends its workers, and is taken for lost."""
        peer = self._peer_of_host.get(host)
        if peer is not None:
            yield Send(peer, {"type": "end"})
            yield from self._lose_host(peer, reason)
            yield Drop(peer, reason)

    def accept_fewer(self, *, now: float) -> Iterator[Action]:
        """Do not wait for all workers of the first world any longer."""
        self.membership.accepts_fewer = True
        yield from self._advance(now)

    # What comes in.

    @override
    def received(self, peer: int, message: Message, now: float) -> Iterator[Action]:
        link = self._links.get(peer)
        if link is not None:
            link.heard = now
            yield from self._hear(peer, link, message, now)
        elif peer in self._dismissed:
            return  # its goodbye, and the beats on the way there
        elif message["type"] == "worker":
            yield from self._welcome(peer, message, now)
        else:
            yield from super().received(peer, message, now)

    @override
    def lost(self, peer: int, reason: str, now: float) -> Iterator[Action]:
        if peer in self._links:
            number = self._links[peer].worker
            self._forget(number)
            worker = self.membership.workers.get(number)
            if worker is not None and worker.phase is not Phase.DETACHED:
                self.membership.remove(number)
                if worker.phase is Phase.MEMBER:
                    yield from self._lose(worker, f"its connection ended ({reason})")
            yield from self._advance(now)
        elif peer in self._dismissed:
            self._dismissed.remove(peer)
        else:
            yield from super().lost(peer, reason, now)

    @override
    def stood_still(self, seconds: float, now: float) -> None:
        super().stood_still(seconds, now)
        for link in self._links.values():
            link.heard = min(now, link.heard + seconds)
        self._stepped = min(now, self._stepped + seconds)

    @override
    def tick(self, now: float) -> Iterator[Action]:
        yield from super().tick(now)
        silent = [peer for peer, link in self._links.items() if now - link.heard > self._silence]
        for peer in silent:
            worker = self.membership.workers.get(self._links[peer].worker)
            if worker is not None and worker.phase is Phase.MEMBER:
                seconds = now - self._links[peer].heard
                yield from self._give_up(peer, worker, f"nothing was heard of it for {seconds:.1f} seconds")
        if self._has_world and self._stall is not None and self._steps and now - self._stepped > self._stall:
            yield from self._give_up_stalled(now)
        yield from self._advance(now)

    def _welcome(self, peer: int, message: Message, now: float) -> Iterator[Action]:
        number = int(message["worker"])
        worker = self.membership.workers.get(number)
        if worker is None or number in self._peers or worker.phase is not Phase.STARTING:
            yield Send(peer, refusal(f"worker {number} is not awaited: it was taken for lost, or has come before"))
            yield Drop(peer, f"worker {number}, which is not awaited")
            return
        yield from self._admit(peer, number, now)

    def _admit(self, peer: int, number: int, now: float) -> Iterator[Action]:
        """Take a worker's connection into the tables."""
        self._links[peer] = _Link(number, heard=now)
        self._peers[number] = peer
        is_first = not self.membership.has_begun
        yield Send(peer, {"type": "welcome", "is_first": is_first, "beat_sec": self._beat_sec})

    @property
    def _beat_sec(self) -> float:
        """Time between two heartbeats of a worker. Many workers send theirs less often, as far as the limit allows."""
        number = max(len(self.membership.workers), self.membership.num_first if not self.membership.has_begun else 0)
        seconds = min(self._silence / BEATS_PER_LIMIT, 1.0)
        return max(seconds, min(self._silence / FEWEST_BEATS_PER_LIMIT, number / MAX_BEATS_PER_SEC))

    def _hear(self, peer: int, link: _Link, message: Message, now: float) -> Iterator[Action]:
        kind = message["type"]
        worker = self.membership.workers[link.worker]
        if kind == "ready":
            yield from self._take_back(worker, message, now)
        elif kind == "beat":
            self._note_steps(link, int(message["steps"]), now)
            yield Publish(Beat(worker.number, link.steps, dict(message.get("step_times", {}))))
        elif kind == "leaving":
            self.membership.leave(worker.number)
            yield Publish(JobEvent("leaving", {"worker": worker.number, "rank": worker.rank}))
            yield from self._advance(now)
        elif kind == "detached":
            self.membership.detach(worker.number)
        elif kind == "give_up":
            yield Publish(JobEvent("state_lost", {"worker": worker.number, "reason": str(message["reason"])}))
        elif kind == "happened" and message["event"] in WORKER_EVENTS:
            yield Publish(JobEvent(str(message["event"]), {"worker": worker.number, **message["fields"]}))
        else:
            raise ValueError(f"unknown message {kind!r}")

    def _take_back(self, worker: Worker, message: Message, now: float) -> Iterator[Action]:
        was_member = worker.phase is Phase.MEMBER and int(message["generation"]) == self.generation
        is_new = worker.rank is None
        if worker.phase is Phase.MEMBER and not was_member:
            # Its place in this generation never reached it, so the others wait for it in vain.
            yield from self._end_world(f"rank {worker.rank} has not heard of generation {self.generation}", ())
        self.membership.ready(worker.number, int(message["progress"]), now)
        if is_new:
            yield Publish(JobEvent("joined", {"worker": worker.number, "host": worker.host}))
        if was_member and message["reason"]:
            # It could not go on, and nobody told it so: whatever it was, the others cannot go on either.
            yield from self._end_world(f"rank {worker.rank} could not go on: {message['reason']}", ())
        yield from self._advance(now)

    def _note_steps(self, link: _Link, steps: int, now: float) -> None:
        if steps > link.steps:
            link.steps = steps
            self._steps += 1
            self._stepped = now

    # The world

    def _advance(self, now: float) -> Iterator[Action]:
        """Take the actions that the state of the membership requires."""
        membership = self.membership
        for worker in self._may_be_dismissed():
            is_new = worker.progress == NO_STATE or worker.number in self._standing_by
            came_too_late = membership.is_finishing and is_new and membership.has_begun
            if came_too_late or (worker.is_leaving and not membership.has_members and not self._waits_to_give(worker)):
                yield from self._dismiss(worker.number)
        if membership.can_form(after_loss=self._was_lost):
            yield from self._form(now)
        elif self._has_world and not self._is_change_told and membership.wants_change(now):
            yield from self._tell_change()
        yield from self._let_stand_by()
        is_short = membership.has_begun and not membership.has_members and membership.is_awaited
        is_short = is_short and not membership.is_finishing
        if is_short != self._is_short:
            self._is_short = is_short
            fields = {
                "waiting": len(membership.waiting),
                "needed": membership.min_num,
                "replica": membership.shape.equation,
                "missing": [] if membership.may_be_done else list(membership.missing_parts),
                "newcomers": 0 if membership.may_be_done else membership.num_newcomers_needed,
            }
            yield Publish(JobEvent("short" if is_short else "enough", fields))

    def _let_stand_by(self) -> Iterator[Action]:
        """Tell those for whom the present world has no room that they wait as long as it takes."""
        membership = self.membership
        standing_by = membership.standing_by
        if standing_by is self._last_over[0] and len(standing_by) == self._last_over[1]:
            return
        self._last_over = standing_by, len(standing_by)
        for worker in standing_by:
            is_spare = worker.rank is None
            # Until the next world has formed, nobody knows which members of the last one it has no room for.
            if worker.number not in self._standing_by and (is_spare or self._has_world):
                self._standing_by.add(worker.number)
                fields: dict[str, Any] = {"worker": worker.number}
                if not is_spare:
                    fields |= {"rank": worker.rank, "replica": membership.shape.equation}
                yield Publish(JobEvent("standby", fields))
                yield from self._send(worker.number, {"type": "standby"})

    def _may_be_dismissed(self) -> list[Worker]:
        """Return those that wait and may have no place in the next world."""
        if self.membership.is_finishing and self.membership.has_begun:
            return self.membership.waiting
        return [] if self.membership.has_members else self.membership.waiting_to_leave

    def _waits_to_give(self, worker: Worker) -> bool:
        """Say whether a worker that is to leave holds what others need first."""
        may_give = self.membership.hands_over or (self._was_lost and self.membership.somebody_stays)
        return may_give and worker.progress > NO_STATE

    @property
    def _is_change_told(self) -> bool:
        """The members were asked to return, and know all that are to leave."""
        return self._change_told and all(
            worker.number in self._leaving_told for worker in self.membership.leaving_members
        )

    def _tell_change(self) -> Iterator[Action]:
        """Ask the members to return, once; and again when others must leave, who then hand over their shares."""
        if not self._change_told:
            self._leaving_told = set()
            yield Publish(JobEvent("change", {"generation": self.generation}))
        leaving = sorted(worker.number for worker in self.membership.leaving_members)
        self._change_told = True
        self._leaving_told |= set(leaving)
        joining = self.membership.others_join
        message: Message = {"type": "change", "generation": self.generation, "leaving": leaving, "joining": joining}
        for worker in self.membership.members:
            yield from self._send(worker.number, message)

    def _form(self, now: float) -> Iterator[Action]:
        if self._has_world:
            yield from self.begin_generation(0)
        world = self.membership.form(self.generation, after_loss=self._was_lost)
        self._was_lost = False
        self._world_size = len(world.places)
        self._has_world = True
        self._change_told = False
        self._stepped = now
        members = {place.rank: number for number, place in world.places.items()}
        fields = {
            "generation": self.generation,
            "world_size": self._world_size,
            "progress": world.progress,
            "workers": [members[rank] for rank in sorted(members)],
        }
        yield Publish(JobEvent("generation", fields))
        self._standing_by -= world.places.keys()
        beat_sec = self._beat_sec
        for number, place in world.places.items():
            message: Message = {
                "type": "assign",
                "generation": self.generation,
                "place": list(vars(place).values()),
                "progress": world.progress,
                "needs_sync": world.needs_sync,
                "beat_sec": beat_sec,
            }
            yield from self._send(number, message)
        for number in world.dismissed:
            yield from self._dismiss(number)

    def _dismiss(self, number: int) -> Iterator[Action]:
        worker = self.membership.remove(number)
        assert worker is not None
        yield Publish(JobEvent("left", {"worker": number, "rank": worker.rank, "progress": worker.progress}))
        yield from self._send(number, {"type": "dismissed"})
        peer = self._forget(number)
        if peer is not None:
            self._dismissed.add(peer)

    def _lose(self, worker: Worker, reason: str) -> Iterator[Action]:
        """Handle the loss of a member, which was removed from the membership."""
        fields = {"worker": worker.number, "rank": worker.rank, "generation": worker.generation, "reason": reason}
        yield Publish(JobEvent("lost", fields))
        assert worker.rank is not None
        yield from self._end_world(f"rank {worker.rank} was lost: {reason}", (worker.rank,))

    def _end_world(self, text: str, ranks: tuple[int, ...]) -> Iterator[Action]:
        if not self._has_world:
            return
        ended = self.generation
        self._has_world = False
        self._was_lost = True
        yield from self.begin_generation(0)
        yield Publish(JobEvent("ended", {"generation": ended, "text": text}))
        message: Message = {"type": "ended", "generation": ended, "text": text, "ranks": list(ranks)}
        for worker in self.membership.workers.values():
            if worker.phase in (Phase.MEMBER, Phase.WAITING) and worker.rank is not None:
                yield from self._send(worker.number, message)

    def _give_up(self, peer: int, worker: Worker, reason: str) -> Iterator[Action]:
        """A worker is there, but does nothing: it is taken for lost, and the launcher ends it."""
        self.membership.remove(worker.number)
        self._forget(worker.number)
        yield Publish(JobEvent("hung", {"worker": worker.number, "rank": worker.rank, "reason": reason}))
        yield from self._lose(worker, reason)
        yield Drop(peer, reason)

    def _give_up_stalled(self, now: float) -> Iterator[Action]:
        """No rank has done a step for too long: the workers that are furthest behind count as hung."""
        by_worker = {link.worker: (peer, link) for peer, link in self._links.items()}
        members = [worker for worker in self.membership.members if worker.number in by_worker]
        fewest = min((by_worker[worker.number][1].steps for worker in members), default=0)
        behind = [worker for worker in members if by_worker[worker.number][1].steps == fewest]
        if len(behind) == len(members):
            self._stepped = now  # all are waiting, in a long evaluation for example: no rank is at fault
            return
        for worker in behind:
            peer = by_worker[worker.number][0]
            yield from self._give_up(peer, worker, f"no step for {now - self._stepped:.0f} seconds")

    def _lose_host(self, peer: int, reason: str) -> Iterator[Action]:
        host = self._agents[peer].host
        yield from super()._lose_host(peer, reason)
        yield from self._lose_workers(host, reason)

    def _lose_workers(self, host: int, reason: str) -> Iterator[Action]:
        """The workers of a host are gone with it."""
        for worker in [worker for worker in self.membership.workers.values() if worker.host == host]:
            self.membership.remove(worker.number)
            gone = self._forget(worker.number)
            if worker.phase in (Phase.MEMBER, Phase.DETACHED):
                yield from self._lose(worker, f"its host was lost: {reason}")
            if gone is not None:
                yield Drop(gone, "its host was lost")

    def _forget(self, number: int) -> int | None:
        """Take a worker's connection out of the tables; returns its peer."""
        peer = self._peers.pop(number, None)
        if peer is not None:
            del self._links[peer]
        return peer

    def _send(self, number: int, message: Message) -> Iterator[Action]:
        peer = self._peers.get(number)
        if peer is not None:
            yield Send(peer, message)
