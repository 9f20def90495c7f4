"""Membership of an elastic job: its workers, and the decision when the next generation of the world begins. Pure.

A *worker* is one process, with a number that is never used twice. It is *starting* until it reports that it is ready,
*waiting* until it is admitted to a generation, and then a *member*, with a rank. When the world has to change, its
members return one by one and wait again. The next generation forms when the last of them has returned or is gone.
A worker for which a world has no room stands by: it joins when a member is lost. A world whose model is divided
consists of whole replicas (`unidist.control.elastic.replicas`): who is over stands by, too.

The member with the most commits has the valid state. It becomes rank 0, from which the others receive the state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from unidist.control.elastic.replicas import Candidate, ReplicaShape, Seating, seat
from unidist.topology import Topology

NO_STATE = -1
"""Progress of a worker that has never been in a world: it has no state from which others could continue."""

GATHER_SEC = 1.0
"""How long a worker that is ready waits for others that are starting, so that the world stops once for all of them."""


_KEPT = ("number", "host", "rank", "generation", "progress", "is_leaving", "part", "replica")
"""What a snapshot has of a worker, beside its phase."""


class Phase(Enum):
    """The phase of a worker's life."""

    STARTING = auto()
    WAITING = auto()
    MEMBER = auto()
    DETACHED = auto()  # it has left the world in good order, and is about to end


@dataclass
class Worker:
    """One process.

    Args:
        number: of the worker.
        host: index of its host.
        phase: of the worker's life.
        rank: in the last world that it was in.
        generation: of that world.
        progress: how many commits the state has seen that it holds; NO_STATE if it holds none.
        is_leaving: it shall not be in the next world.
        since: when it began to wait.
        part: of the model that it has; None: it was in no world whose model is divided.
        replica: that it was in last, in a world whose model is divided.
        peer: its connection to the coordinator; None: it has none.
        heard: when something came by that.
        steps: that it has told of.
        waits: it waits for other ranks, as it has told last.
        patience: seconds for which it waits for the next world.
    """

    number: int
    host: int
    phase: Phase = Phase.STARTING
    rank: int | None = None
    generation: int = -1
    progress: int = NO_STATE
    is_leaving: bool = False
    since: float = 0.0
    part: int | None = None
    replica: int | None = None
    peer: int | None = None
    heard: float = 0.0
    steps: int = 0
    waits: bool = False
    patience: float = math.inf


@dataclass(frozen=True)
class World:
    """One generation.

    Args:
        places: of its members, by worker number.
        progress: of the state that rank 0 gives to the others.
        needs_sync: not all members hold that state.
        dismissed: workers that waited and are to leave.
    """

    places: dict[int, Topology]
    progress: int
    needs_sync: bool
    dismissed: tuple[int, ...]


class Membership:
    """The workers of one job.

    Args:
        num_first: workers of the first world.
        min_num: the fewest workers of a world.
        max_num: the most.
        shape: of a replica of the model; worlds have whole replicas, so `min_num` is rounded up to whole ones.
    """

    def __init__(self, *, num_first: int, min_num: int, max_num: int, shape: ReplicaShape | None = None) -> None:
        self.workers: dict[int, Worker] = {}
        self.is_finishing = False
        """Whether a worker has finished the script: no more workers are admitted, and the minimum no longer applies."""
        self.accepts_fewer = False
        """The first world need not wait for all of `num_first` any longer."""
        self.shape = shape or ReplicaShape()
        self.num_first = num_first
        """Workers of the first world."""
        self._min_num = min_num
        self._max_num = max_num
        self.has_begun = False
        """There was a world already."""
        self._room: dict[int, int] = {}  # by host
        self.version = 0
        """Grows with every change of a worker."""
        # Indices of `workers`, so that an event of one worker costs no look at all the others.
        self._in: dict[Phase, dict[int, Worker]] = {phase: {} for phase in Phase}
        self._new: dict[int, Worker] = {}  # that wait, and have never been in a world
        self._leaving: dict[int, Worker] = {}
        self._sorted: _Newcomers | None = None  # `_new`, sorted out; None: to be done again

    @property
    def members(self) -> list[Worker]:
        """The members of the present world that have not come back yet."""
        return list(self._in[Phase.MEMBER].values())

    @property
    def has_members(self) -> bool:
        """There are such members. Costs nothing, as does `is_awaited`."""
        return bool(self._in[Phase.MEMBER])

    @property
    def waiting(self) -> list[Worker]:
        """Those that wait for the next world."""
        return list(self._in[Phase.WAITING].values())

    @property
    def is_awaited(self) -> bool:
        """Somebody waits for the next world."""
        return bool(self._in[Phase.WAITING])

    @property
    def waiting_to_leave(self) -> list[Worker]:
        """Those that wait, and are not to be in the next world."""
        return [worker for worker in self._leaving.values() if worker.phase is Phase.WAITING]

    @property
    def leaving_members(self) -> list[Worker]:
        """The members that are not to be in the next world, and have not come back yet."""
        return [worker for worker in self._leaving.values() if worker.phase is Phase.MEMBER]

    @property
    def min_num(self) -> int:
        """The fewest workers of the next world."""
        fewest = 1 if self.is_finishing else self._min_num
        return -(-fewest // self.shape.size) * self.shape.size

    def expect(self, number: int, host: int) -> None:
        """A worker is about to be started."""
        self._add(Worker(number, host))
        self.version += 1

    def limit_host(self, host: int, room: int) -> None:
        """Admit no newcomer to a world that has this many members on the host; there is no limit before."""
        if self._room.get(host) != room:
            self._room[host] = room
            self._sorted = None
            self.version += 1

    def ready(self, number: int, progress: int, now: float) -> None:
        """A worker waits for the next world from now on."""
        worker = self.workers[number]
        worker.progress, worker.since = progress, now
        self._move(worker, Phase.WAITING)
        self.version += 1

    def detach(self, number: int) -> None:
        """A worker has left the world in good order."""
        self._move(self.workers[number], Phase.DETACHED)
        self._sorted = None
        self.version += 1

    def leave(self, number: int) -> None:
        """A worker shall not be in the next world."""
        if number in self.workers:
            self.workers[number].is_leaving = True
            self._leaving[number] = self.workers[number]
            self._sorted = None
            self.version += 1

    def remove(self, number: int) -> Worker | None:
        """Remove a worker that is gone and return it; None if it was removed before."""
        self.version += 1
        worker = self.workers.pop(number, None)
        if worker is not None:
            self._in[worker.phase].pop(number)
            self._new.pop(number, None)
            self._leaving.pop(number, None)
            self._sorted = None
        return worker

    def wants_change(self, now: float) -> bool:
        """Return whether the members should return at their next commit: some must leave, or others wait to join."""
        if self.leaving_members:
            return True
        room = self._max_num - len(self._in[Phase.MEMBER])
        if self.is_finishing or room < self.shape.size or not self.is_awaited:
            return False
        is_alone = not self._in[Phase.STARTING]
        waiting = self._in[Phase.WAITING]
        if not is_alone and len(waiting) < room and now - next(iter(waiting.values())).since < GATHER_SEC:
            return False  # whoever of them would join
        newcomers = self._newcomers
        if not newcomers:
            return False
        return is_alone or len(newcomers) >= room or now - min(each.since for each in newcomers) >= GATHER_SEC

    @property
    def others_join(self) -> bool:
        """The next world would have workers that wait now."""
        return bool(self._newcomers) and not self.is_finishing

    @property
    def _newcomers(self) -> list[Worker]:
        """Those that wait to join the members that stay, in a world that has room for them."""
        if self.shape.size > 1 or self._num_staying > self._max_num:
            staying = [worker for worker in (*self.members, *self.waiting) if not worker.is_leaving]
            return [worker for worker in self._with_room(staying) if worker.phase is Phase.WAITING]
        back = [each for each in self._in[Phase.WAITING].values() if each.rank is not None and not each.is_leaving]
        return [*back, *self._sort_out().joining]

    def _sort_out(self) -> _Newcomers:
        """Return which of those that have never been in a world one has room for, beside all that have.

        For worlds whose model is not divided. Kept until something changes that it depends on: while the members of a
        world come back one by one, nothing does.
        """
        if self._sorted is None:
            self._sorted = _Newcomers(self._max_num - self._num_staying)
            if self._room:
                self._sorted.taken.update(
                    worker.host for worker in self.workers.values() if _has_place(worker) and not worker.is_leaving
                )
            for worker in sorted(self._new.values(), key=_by_seniority):
                self._sorted.add(worker, self._room.get(worker.host))
        return self._sorted

    @property
    def standing_by(self) -> list[Worker]:
        """Those that wait, and for which the present world has no room. The same list until it changes, but longer."""
        if not self.has_members or not self.is_awaited:
            return []
        if self.shape.size == 1:
            return self._sort_out().over
        joining = {worker.number for worker in self._newcomers}
        return [each for each in self.waiting if not each.is_leaving and each.number not in joining]

    @property
    def _num_staying(self) -> int:
        """How many of those that have a rank are not to leave."""
        num = len(self._in[Phase.MEMBER]) + len(self._in[Phase.WAITING]) - len(self._new)
        return num - sum(_has_place(worker) for worker in self._leaving.values())

    @property
    def missing_parts(self) -> tuple[int, ...]:
        """The parts that those who wait need somebody for, to have another replica; with a model that is divided."""
        candidates = [worker for worker in self.waiting if not worker.is_leaving]
        return self._seating(candidates, self._max_num).vacant if self.shape.size > 1 else ()

    @property
    def num_newcomers_needed(self) -> int:
        """How many workers without a part the smallest world needs beside those that wait and have one.

        0 with a model that is whole on each worker.
        """
        if self.shape.size == 1:
            return 0
        held = Counter(worker.part for worker in self.waiting if not worker.is_leaving)
        num_replicas = self.min_num // self.shape.size
        return sum(max(0, num_replicas - held[part]) for part in range(self.shape.size))

    @property
    def may_be_done(self) -> bool:
        """There is a worker that has left the world in good order, and whose process has not ended yet."""
        return bool(self._in[Phase.DETACHED])

    @property
    def somebody_stays(self) -> bool:
        """There is a worker that is not to leave, though it may not have come yet."""
        return any(not (each.is_leaving or each.phase is Phase.DETACHED) for each in self.workers.values())

    @property
    def hands_over(self) -> bool:
        """Those that wait and stay have no state, and those that have it are to leave: these go along once more."""
        staying = [worker for worker in self.waiting if not worker.is_leaving]
        if self.is_finishing or not self.has_begun or not staying:
            return False
        return all(worker.progress == NO_STATE for worker in [*staying, *self.members])

    def can_form(self, *, after_loss: bool = False) -> bool:
        """Return whether the next world can begin: all members of the last one have returned, and there are enough.

        Args:
            after_loss: see `form`.
        """
        if self.has_members or len(self._in[Phase.WAITING]) < self._num_needed:
            return False
        chosen = self._chosen(after_loss)
        number = len(chosen)
        if not number:
            return False
        if self.has_begun and self.may_be_done and all(worker.progress == NO_STATE for worker in chosen):
            return False  # they would begin again what others have just come to the end of
        return number >= self._num_needed

    @property
    def _num_needed(self) -> int:
        return self.min_num if self.has_begun or self.accepts_fewer else self.num_first

    def form(self, generation: int, *, after_loss: bool = False) -> World:
        """Begin the next world with those that wait.

        Args:
            generation: its number.
            after_loss: the last world did not end by agreement, so its members may have come to different ends, and
                one that is to leave may hold what the lost one had a copy of: it goes along, and leaves at a commit.
        """
        chosen = self._chosen(after_loss)
        progress = max(worker.progress for worker in chosen)
        first = min((w for w in chosen if w.progress == progress), key=_by_seniority)
        ordered = sorted(chosen, key=lambda w: (w.host != first.host, w.host, w is not first, *_by_seniority(w)))
        needs_sync = after_loss or not self.has_begun or any(worker.progress != progress for worker in chosen)
        self.has_begun = True
        self.version += 1
        if self.shape.size > 1:
            ordered = self._seat_parts(ordered)
        places = _places(ordered)
        for worker in ordered:
            worker.rank, worker.generation = places[worker.number].rank, generation
            self._move(worker, Phase.MEMBER)
        self._sorted = None
        dismissed = [worker.number for worker in self.waiting_to_leave]
        return World(places, max(progress, 0), needs_sync, tuple(dismissed))

    def snapshot(self) -> dict[str, Any]:
        """Return the state from which another process can continue, without times; plain data."""
        workers = [
            {**{name: getattr(worker, name) for name in _KEPT}, "phase": worker.phase.name}
            for worker in self.workers.values()
        ]
        return {
            "workers": workers,
            "room": sorted(self._room.items()),
            "is_finishing": self.is_finishing,
            "accepts_fewer": self.accepts_fewer,
            "has_begun": self.has_begun,
        }

    def restore(self, kept: dict[str, Any], now: float) -> None:
        """Restore what `snapshot` returned; workers that were waiting count as waiting since `now`.

        Raises:
            KeyError: something is missing; so do TypeError and ValueError: it is something else.
        """
        workers = [Worker(**{**fields, "phase": Phase[fields["phase"]]}, since=now) for fields in kept["workers"]]
        for number in list(self.workers):
            self.remove(number)
        for worker in workers:
            self._add(worker)
        self._sorted = None
        self._room = {int(host): int(room) for host, room in kept["room"]}
        self.is_finishing = bool(kept["is_finishing"])
        self.accepts_fewer = bool(kept["accepts_fewer"])
        self.has_begun = bool(kept["has_begun"])
        self.version += 1

    def _chosen(self, after_loss: bool) -> list[Worker]:
        """Return the workers of the next world: members of the last one come first."""
        if self.hands_over:
            givers = [worker for worker in self.waiting if worker.is_leaving and worker.progress > NO_STATE]
            staying = self._with_room([worker for worker in self.waiting if not worker.is_leaving])
            # One that stays is always among them, if need be beyond the most: else this would go on for ever.
            most = max(self.shape.size, self._max_num - len(givers))
            return self._whole_replicas([*givers, *staying[:most]], len(givers) + most)
        candidates = [worker for worker in self.waiting if not worker.is_leaving]
        if after_loss and candidates:  # else nobody would be there to take over what those have that leave
            candidates = [each for each in self.waiting if not each.is_leaving or each.progress > NO_STATE]
        if self.is_finishing and any(worker.progress > NO_STATE for worker in candidates):
            candidates = [worker for worker in candidates if worker.progress > NO_STATE]
        return self._with_room(candidates)

    def _with_room(self, candidates: Sequence[Worker]) -> list[Worker]:
        """Return those that one world has room for: members of the last one first, then by age."""
        chosen: list[Worker] = []
        taken: Counter[int] = Counter()
        most = self._max_num if self.shape.size == 1 else len(candidates)  # whose parts may be those that are missing
        for worker in sorted(candidates, key=_by_seniority):
            room = self._room.get(worker.host)
            is_full = room is not None and taken[worker.host] >= room
            if len(chosen) < most and not (is_full and worker.rank is None):
                taken[worker.host] += 1
                chosen.append(worker)
        return self._whole_replicas(chosen, self._max_num)

    # The indices

    def _add(self, worker: Worker) -> None:
        self.workers[worker.number] = worker
        self._move(worker, worker.phase)
        if worker.is_leaving:
            self._leaving[worker.number] = worker

    def _move(self, worker: Worker, phase: Phase) -> None:
        """Change a worker's phase, after its rank."""
        self._in[worker.phase].pop(worker.number, None)
        worker.phase = phase
        self._in[phase][worker.number] = worker
        if self._new.pop(worker.number, None) is not None:
            self._sorted = None
        if phase is Phase.WAITING and worker.rank is None:
            self._new[worker.number] = worker
            if self._sorted is not None and worker.number > self._sorted.last:
                self._sorted.add(worker, self._room.get(worker.host))
            else:
                self._sorted = None

    # Worlds whose model is divided

    def _seating(self, candidates: Sequence[Worker], most: int) -> Seating:
        """Return the seats in a world of at most so many workers, of a model that is divided."""
        asked = [Candidate(each.number, each.host, each.part, each.replica) for each in candidates]
        return seat(self.shape, asked, most // self.shape.size)

    def _whole_replicas(self, candidates: Sequence[Worker], most: int) -> list[Worker]:
        """Return the candidates that form whole replicas, in their order."""
        if self.shape.size == 1:
            return list(candidates)
        # Those of the present world first: while it goes on, nobody takes their place.
        ordered = sorted(candidates, key=lambda each: each.phase is not Phase.MEMBER)
        seated = set(self._seating(ordered, most).workers)
        return [worker for worker in candidates if worker.number in seated]

    def _seat_parts(self, chosen: Sequence[Worker]) -> list[Worker]:
        """Return the workers of a world by rank, each with its part of the model from now on."""
        seating = self._seating(chosen, len(chosen))
        assert not seating.over, "whole replicas were chosen"
        for rank, (number, part) in enumerate(zip(seating.workers, seating.parts, strict=True)):
            worker = self.workers[number]
            worker.part, worker.replica = part, self.shape.replica(rank, seating.num_replicas)
        return [self.workers[number] for number in seating.workers]


@dataclass
class _Newcomers:
    """Workers that have never been in a world, by age.

    Args:
        room: how many of them the next world has room for.
        joining: those that it takes.
        over: the others that are not to leave.
        taken: by host, how many of the next world are there, as far as hosts have limits.
        last: number of the youngest.
    """

    room: int
    joining: list[Worker] = field(default_factory=list)
    over: list[Worker] = field(default_factory=list)
    taken: Counter[int] = field(default_factory=Counter)
    last: int = -1

    def add(self, worker: Worker, limit: int | None) -> None:
        """Add one that is younger than all others; its host may have a limit."""
        self.last = worker.number
        if worker.is_leaving:
            return
        if len(self.joining) < self.room and (limit is None or self.taken[worker.host] < limit):
            self.taken[worker.host] += 1
            self.joining.append(worker)
        else:
            self.over.append(worker)


def _has_place(worker: Worker) -> bool:
    """Return whether a worker is in the present world, or has come back from the last one."""
    return worker.rank is not None and worker.phase in (Phase.MEMBER, Phase.WAITING)


def _by_seniority(worker: Worker) -> tuple[bool, int, int]:
    return worker.rank is None, worker.rank or 0, worker.number


def _places(ordered: Sequence[Worker]) -> dict[int, Topology]:
    """Return the places of workers, in the order of their ranks; hosts count in the order of their first ranks."""
    sizes = Counter(worker.host for worker in ordered)  # in the order of the hosts
    node_ranks = {host: node_rank for node_rank, host in enumerate(sizes)}
    places: dict[int, Topology] = {}
    seen: Counter[int] = Counter()
    for rank, worker in enumerate(ordered):
        host = worker.host
        places[worker.number] = Topology(rank, len(ordered), seen[host], sizes[host], node_ranks[host], len(node_ranks))
        seen[host] += 1
    return places
