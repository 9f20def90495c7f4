"""The coordinator of an elastic job, which also decides who is a member of the world. Pure.

Messages of a worker, and messages to it:

    worker -> coordinator   WorkerHere   its number: here I am                     -> Welcome
                            Ready        I wait for the next world                 -> Assign, or Dismissed
                            WorkerBeat   I am alive, and so far
                            Leaving      I was asked to end (SIGTERM): please let me go at the next commit
                            Detached     I have left the world in good order
                            StateLost    what the members held is lost: end the job
                            Happened     for the job's log: a checkpoint was made, or loaded
    coordinator -> worker   Standby      there is no room for you now: wait as long as it takes
                            Change       come back (`Ready`) at your next commit: others come, or go
                            WorldEnded   your generation has ended: stop what you do, restore, come back

A worker is lost when its connection ends, when its host is lost, when its process ends, or when nothing was heard of it
for longer than the limit. Whichever is seen first counts: the generation ends, and the others are told at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from typing_extensions import override

from unidist.control.codec import Message, unexpected
from unidist.control.coordinator import BEATS_PER_LIMIT, Coordinator
from unidist.control.elastic.membership import NO_STATE, Membership, Phase, Worker
from unidist.control.meeting import refusal
from unidist.control.messages import (
    Assign,
    Change,
    Detached,
    Dismissed,
    End,
    Happened,
    Leaving,
    Ready,
    Standby,
    StateLost,
    StepTimeReport,
    Welcome,
    WorkerBeat,
    WorkerHere,
    WorldEnded,
)
from unidist.control.service import Action, Drop, Publish, Send

WORKER_EVENTS = frozenset({"checkpoint", "checkpoint_loaded"})
"""Kinds of events that workers may add to the job's log."""

MAX_BEATS_PER_SEC = 500
"""All workers together send about so many heartbeats: each one costs the launcher the same."""

FEWEST_BEATS_PER_LIMIT = 3
"""But a worker sends so many within the time after which it is taken for lost."""

_PART_OF_PATIENCE = 0.9
"""A member that does not come back is declared lost slightly before the workers that wait for it give up."""


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
        step_times: what the worker says.
    """

    worker: int
    num_commits: int
    step_times: StepTimeReport


class ElasticCoordinator(Coordinator):
    """Decides for one elastic job; publishes `JobEvent` and `Beat` beside what `Coordinator` publishes.

    Args:
        membership: the rules of the world's size.
        heartbeat: a host from which nothing comes for longer is lost.
        silence: a worker from which nothing comes for longer hangs, and is taken for lost.
        stall: a world in which no worker has taken a step for longer has ended, if it shows who is at fault: those
            that are behind the others, or that the others wait for; None: it may wait for ever.
    """

    def __init__(
        self, membership: Membership, *, heartbeat: timedelta, silence: timedelta, stall: timedelta | None = None
    ) -> None:
        super().__init__(num_hosts=0, world_size=0, heartbeat=heartbeat)
        self.membership = membership
        self._silence = silence.total_seconds()
        self._stall = None if stall is None else stall.total_seconds()
        self._connected: dict[int, Worker] = {}  # by peer
        self._dismissed: set[int] = set()
        self._standing_by: set[int] = set()  # workers that were told so
        self._last_over: tuple[list[Worker], int] = ([], 0)
        self._has_world = False
        self._was_lost = False
        self._change_told = False
        self._leaving_told: set[int] = set()
        self._stepped = 0.0
        self._absent_since: float | None = None
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
        if succeeded:
            self.membership.is_finishing = True
            yield Publish(JobEvent("finished", {"worker": number}))
        if worker is None:
            return
        self._forget(worker)
        has_failed = worker.phase is Phase.DETACHED and not succeeded
        if worker.rank is not None and (worker.phase is Phase.MEMBER or has_failed):  # else it was in no world
            yield from self._lose(worker, reason)
        yield from self._advance(now)

    def process_ended(self, number: int, *, now: float) -> Iterator[Action]:
        """A worker's process has ended; how, is not known yet. A child of it may still hold its connection open."""
        worker = self.membership.workers.get(number)
        if worker is not None and worker.phase is not Phase.DETACHED:
            peer = self._forget(worker)
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
            yield Send(peer, End())
            yield from self._lose_host(peer, reason)
            yield Drop(peer, reason)

    def accept_fewer(self, *, now: float) -> Iterator[Action]:
        """Do not wait for all workers of the first world any longer."""
        self.membership.accepts_fewer = True
        yield from self._advance(now)

    # What comes in.

    @override
    def received(self, peer: int, message: Message, now: float) -> Iterator[Action]:
        worker = self._connected.get(peer)
        if worker is not None:
            worker.heard = now
            yield from self._hear(worker, message, now)
        elif peer in self._dismissed:
            return  # its goodbye, and the beats on the way there
        elif isinstance(message, WorkerHere):
            yield from self._welcome(peer, message, now)
        else:
            yield from super().received(peer, message, now)

    @override
    def lost(self, peer: int, reason: str, now: float) -> Iterator[Action]:
        worker = self._connected.get(peer)
        if worker is not None:
            self._forget(worker)
            if worker.phase is not Phase.DETACHED:
                self.membership.remove(worker.number)
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
        for worker in self._connected.values():
            worker.heard = min(now, worker.heard + seconds)
        self._stepped = min(now, self._stepped + seconds)
        if self._absent_since is not None:
            self._absent_since = min(now, self._absent_since + seconds)

    @override
    def tick(self, now: float) -> Iterator[Action]:
        yield from super().tick(now)
        for worker in [each for each in self._connected.values() if now - each.heard > self._silence]:
            if worker.phase is Phase.MEMBER:
                yield from self._give_up(worker, f"nothing was heard of it for {now - worker.heard:.1f} seconds")
        if self._has_world and self._stall is not None and self._steps and now - self._stepped > self._stall:
            yield from self._give_up_stalled(now)
        yield from self._give_up_absent(now)
        yield from self._advance(now)

    def _welcome(self, peer: int, message: WorkerHere, now: float) -> Iterator[Action]:
        number = message.worker
        worker = self.membership.workers.get(number)
        if worker is None or worker.peer is not None or worker.phase is not Phase.STARTING:
            yield Send(peer, refusal(f"worker {number} is not awaited: it was taken for lost, or has come before"))
            yield Drop(peer, f"worker {number}, which is not awaited")
            return
        yield from self._admit(peer, worker, now)

    def _admit(self, peer: int, worker: Worker, now: float) -> Iterator[Action]:
        """Take a worker's connection into the tables."""
        worker.peer, worker.heard = peer, now
        self._connected[peer] = worker
        yield Send(peer, Welcome(not self.membership.has_begun, self._beat_sec))

    @property
    def _beat_sec(self) -> float:
        """Time between two heartbeats of a worker. Many workers send theirs less often, as far as the limit allows."""
        number = max(len(self.membership.workers), self.membership.num_first if not self.membership.has_begun else 0)
        seconds = min(self._silence / BEATS_PER_LIMIT, 1.0)
        return max(seconds, min(self._silence / FEWEST_BEATS_PER_LIMIT, number / MAX_BEATS_PER_SEC))

    def _hear(self, worker: Worker, message: Message, now: float) -> Iterator[Action]:
        match message:
            case WorkerBeat(steps, waits, step_times):
                self._note_steps(worker, steps, now)
                worker.waits = waits
                yield Publish(Beat(worker.number, worker.steps, step_times))
            case Ready(patience=patience):
                worker.patience = patience
                yield from self._take_back(worker, message, now)
            case Leaving():
                self.membership.leave(worker.number)
                yield Publish(JobEvent("leaving", {"worker": worker.number, "rank": worker.rank}))
                yield from self._advance(now)
            case Detached():
                self.membership.detach(worker.number)
            case StateLost(reason):
                yield Publish(JobEvent("state_lost", {"worker": worker.number, "reason": reason}))
            case Happened(event, fields) if event in WORKER_EVENTS:
                yield Publish(JobEvent(event, {"worker": worker.number, **fields}))
            case _:
                raise unexpected(message)

    def _take_back(self, worker: Worker, message: Ready, now: float) -> Iterator[Action]:
        was_member = worker.phase is Phase.MEMBER and message.generation == self.generation
        is_new = worker.rank is None
        if worker.phase is Phase.MEMBER and not was_member:
            # Its place in this generation never reached it, so the others wait for it in vain.
            yield from self._end_world(f"rank {worker.rank} has not heard of generation {self.generation}", ())
        self.membership.ready(worker.number, message.progress, now)
        if is_new:
            yield Publish(JobEvent("joined", {"worker": worker.number, "host": worker.host}))
        if was_member and message.reason:
            # It could not go on, and nobody told it so: whatever it was, the others cannot go on either.
            yield from self._end_world(f"rank {worker.rank} could not go on: {message.reason}", ())
        yield from self._advance(now)

    def _note_steps(self, worker: Worker, steps: int, now: float) -> None:
        if steps > worker.steps:
            worker.steps = steps
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
                yield from self._send(worker, Standby())

    def _may_be_dismissed(self) -> list[Worker]:
        """Return those that wait and may have no place in the next world."""
        if self.membership.is_finishing and self.membership.has_begun:
            return self.membership.waiting
        return [] if self.membership.has_members else self.membership.waiting_to_leave

    def _waits_to_give(self, worker: Worker) -> bool:
        """Return whether a worker that is to leave holds what others need first."""
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
        message = Change(self.generation, tuple(leaving), self.membership.others_join)
        for worker in self.membership.members:
            yield from self._send(worker, message)

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
            message = Assign(self.generation, place, world.progress, world.needs_sync, beat_sec)
            yield from self._send(self.membership.workers[number], message)
        for number in world.dismissed:
            yield from self._dismiss(number)

    def _dismiss(self, number: int) -> Iterator[Action]:
        worker = self.membership.remove(number)
        assert worker is not None
        yield Publish(JobEvent("left", {"worker": number, "rank": worker.rank, "progress": worker.progress}))
        yield from self._send(worker, Dismissed())
        peer = self._forget(worker)
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
        message = WorldEnded(ended, text, ranks)
        for worker in self.membership.workers.values():
            if worker.phase in (Phase.MEMBER, Phase.WAITING) and worker.rank is not None:
                yield from self._send(worker, message)

    def _give_up(self, worker: Worker, reason: str) -> Iterator[Action]:
        """A worker is there, but does nothing: it is taken for lost, and the launcher ends it."""
        self.membership.remove(worker.number)
        peer = self._forget(worker)
        yield Publish(JobEvent("hung", {"worker": worker.number, "rank": worker.rank, "reason": reason}))
        yield from self._lose(worker, reason)
        if peer is not None:
            yield Drop(peer, reason)

    def _give_up_stalled(self, now: float) -> Iterator[Action]:
        """No rank has done a step for too long: those furthest behind, and not waiting for others, count as hung."""
        members = _connected(self.membership.members)
        fewest = min((worker.steps for worker in members), default=0)
        behind = [worker for worker in members if worker.steps == fewest]
        if len(behind) == len(members):
            behind = [worker for worker in members if not worker.waits]
        if not behind or (len(behind) == len(members) and not self._those_back()):
            self._stepped = now  # all are busy, with a long evaluation for example: no rank is at fault
            return
        for worker in behind:
            yield from self._give_up(worker, f"no step for {now - self._stepped:.0f} seconds")

    def _give_up_absent(self, now: float) -> Iterator[Action]:
        """Members that do not come back, as others of their world have, count as hung before those end their wait."""
        back = self._those_back()
        if not back:
            self._absent_since = None
            return
        since = self._absent_since = now if self._absent_since is None else self._absent_since
        if now - since > _PART_OF_PATIENCE * min(worker.patience for worker in back):
            for worker in _connected(self.membership.members):
                yield from self._give_up(worker, f"others have come back, and it has not for {now - since:.1f} seconds")

    def _those_back(self) -> list[Worker]:
        """Return those that wait for the next world, and were in the one that the present members are in."""
        membership = self.membership
        if not membership.has_members or not membership.is_awaited:
            return []
        generation = membership.members[0].generation
        return _connected(
            each for each in membership.waiting if each.rank is not None and each.generation == generation
        )

    def _lose_host(self, peer: int, reason: str) -> Iterator[Action]:
        host = self._agents[peer].host
        yield from super()._lose_host(peer, reason)
        yield from self._lose_workers(host, reason)

    def _lose_workers(self, host: int, reason: str) -> Iterator[Action]:
        """The workers of a host are gone with it."""
        for worker in [worker for worker in self.membership.workers.values() if worker.host == host]:
            self.membership.remove(worker.number)
            gone = self._forget(worker)
            if worker.phase in (Phase.MEMBER, Phase.DETACHED):
                yield from self._lose(worker, f"its host was lost: {reason}")
            if gone is not None:
                yield Drop(gone, "its host was lost")

    def _forget(self, worker: Worker) -> int | None:
        """Take a worker's connection out of the tables; returns its peer."""
        peer, worker.peer = worker.peer, None
        if peer is not None:
            del self._connected[peer]
        return peer

    @staticmethod
    def _send(worker: Worker, message: Message) -> Iterator[Action]:
        if worker.peer is not None:
            yield Send(worker.peer, message)


def _connected(workers: Iterable[Worker]) -> list[Worker]:
    return [worker for worker in workers if worker.peer is not None]
