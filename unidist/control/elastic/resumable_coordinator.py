"""The coordinator of an elastic job that another process can take over when this one has died. Pure.

What it knows is of two kinds. A little is kept (`snapshot`), before anybody is told of it: which generation counts, so
that numbers never go back; who its members are; which agents have come, and which workers may. All else is told again
by those who come back (`restore`). None of them had to stop: the data of training never went through here.

An agent comes back with the workers that it has, or has seen end; one that had not come yet when the last coordinator
ended does not look for the next one, and is lost at once. A worker comes back with a `WorkerHere`:

    generation   that it is in; -1: in none yet
    waits        the `Ready` that was not answered yet; none while it is training
    leaving      it was asked to end
    gives_up     why the job is to end; "" if it is not
    detached     it has left the world in good order

so whatever was lost on its way, in either direction, is made good:

    a `Ready` that the last coordinator took and did not answer      is in `waits`
    an `Assign` that was kept but never arrived                      the worker waits with an older generation: that
                                                                     world ends, and the next one forms
    a `WorldEnded` or `Change` that never arrived                    is sent again
    a rank that was lost meanwhile                                   its peers have noticed, and wait; its agent tells

Nothing is decided about the world until all members have come back, are known to have ended, or have had `patience`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

from typing_extensions import override

from unidist.control.coordinator import HostLost
from unidist.control.elastic.coordinator import ElasticCoordinator, JobEvent
from unidist.control.elastic.membership import Membership, Phase, Worker
from unidist.control.messages import HostFacts, WorkerHere, WorldEnded
from unidist.control.service import Action, Publish, Send

Snapshot = dict[str, Any]
"""The state of a coordinator or of the launcher, as plain data."""


class ResumableCoordinator(ElasticCoordinator):
    """An `ElasticCoordinator` that can be taken over.

    Args:
        membership: as for `ElasticCoordinator`, as are `heartbeat`, `silence` and `stall`.
        heartbeat: see there.
        silence: see there.
        stall: see there.
        patience: after `restore`, who has not come back for longer is lost. Those who look for a coordinator give up
            earlier, so nobody that is given up here still runs.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        heartbeat: timedelta,
        silence: timedelta,
        stall: timedelta | None = None,
        patience: timedelta,
    ) -> None:
        super().__init__(membership, heartbeat=heartbeat, silence=silence, stall=stall)
        self._patience = patience.total_seconds()
        self._awaited: set[int] = set()
        self._awaited_hosts: set[int] = set()
        self._absent: set[int] = set()
        self._give_up_at = 0.0
        self._seen: tuple[object, ...] = ()

    # What is kept

    def snapshot(self) -> Snapshot:
        """Return what another process needs to take over."""
        return {
            "generation": self.generation,
            "num_hosts": self._num_hosts,
            "gone": sorted(self._gone),
            "came": sorted(self._came),
            "has_world": self._has_world,
            "was_lost": self._was_lost,
            "world_size": self._world_size,
            "membership": self.membership.snapshot(),
        }

    def news(self) -> Snapshot | None:
        """Return the snapshot if it is not that of the last call; None if it is."""
        membership = self.membership
        seen = (
            *(membership.version, membership.is_finishing, membership.accepts_fewer, membership.has_begun),
            *(self.generation, self._num_hosts, len(self._gone), len(self._came), self._has_world, self._was_lost),
        )
        if seen == self._seen:
            return None
        self._seen = seen
        return self.snapshot()

    def restore(self, kept: Snapshot, *, now: float) -> None:
        """Take over from what `snapshot` returned, and await those who were there. Before anything else is called.

        Raises:
            KeyError: something is missing; so do TypeError and ValueError: it is something else.
        """
        self.generation = int(kept["generation"])
        self._num_hosts = int(kept["num_hosts"])
        self._gone = {int(host) for host in kept["gone"]}
        self._has_world = bool(kept["has_world"])
        self._was_lost = bool(kept["was_lost"])
        self._world_size = int(kept["world_size"])
        self.membership.restore(kept["membership"], now)
        self._awaited = {
            worker.number
            for worker in self.membership.workers.values()
            if worker.phase in (Phase.MEMBER, Phase.WAITING)
        }
        self._awaited_hosts = {int(host) for host in kept["came"]}
        self._absent = set(range(self._num_hosts)) - self._awaited_hosts
        self._give_up_at = now + self._patience
        self._stepped = now

    @property
    def _came(self) -> set[int]:
        """Agents that are there, or were with the last coordinator and may come back."""
        return self._peer_of_host.keys() | self._awaited_hosts

    # Those who come back

    def _welcome(self, peer: int, message: WorkerHere, now: float) -> Iterator[Action]:
        number = message.worker
        worker = self.membership.workers.get(number)
        if worker is not None and number in self._awaited:
            self._awaited.remove(number)
            yield from self._admit(peer, worker, now)
        else:
            yield from super()._welcome(peer, message, now)
        if worker is not None and worker.peer == peer:
            yield from self._catch_up(peer, worker, message, now)

    def _catch_up(self, peer: int, worker: Worker, message: WorkerHere, now: float) -> Iterator[Action]:
        """Make good what the worker and the last coordinator did not hear of each other."""
        told = message.generation
        if message.leaving:
            self.membership.leave(worker.number)
        if message.gives_up:
            yield Publish(JobEvent("state_lost", {"worker": worker.number, "reason": message.gives_up}))
        if message.detached:
            self.membership.detach(worker.number)
        elif message.waits is not None:
            yield from self._take_back(worker, message.waits, now)
        elif told >= 0 and not (self._has_world and told == self.generation):
            text = f"generation {told} has ended while the coordinator was away"
            yield Send(peer, WorldEnded(told, text))
        yield from self._advance(now)

    def _welcome_agent(self, peer: int, facts: HostFacts, now: float) -> Iterator[Action]:
        self._awaited_hosts.discard(facts.host)
        yield from super()._welcome_agent(peer, facts, now)

    @override
    def end_worker(self, number: int, reason: str, *, now: float, succeeded: bool) -> Iterator[Action]:
        if succeeded and number in self._awaited and number in self.membership.workers:
            self.membership.detach(number)  # it has left, and there was nobody whom it could tell
        yield from super().end_worker(number, reason, now=now, succeeded=succeeded)

    # Those who do not

    @override
    def tick(self, now: float) -> Iterator[Action]:
        absent, self._absent = self._absent, set()  # of those that were lost before, the launcher may not know yet
        yield from self._lose_hosts(absent, "its agent was not there when the launcher died")
        if (self._awaited or self._awaited_hosts) and now >= self._give_up_at:
            yield from self._forsake()
        yield from super().tick(now)

    def _forsake(self) -> Iterator[Action]:
        reason = f"it has not come back in the {self._patience:g} seconds after the launcher was started again"
        yield from self._lose_hosts(self._awaited_hosts, reason)
        for number in sorted(self._awaited):
            worker = self.membership.remove(number)
            if worker is not None:
                yield Publish(JobEvent("hung", {"worker": number, "rank": worker.rank, "reason": reason}))
                if worker.phase is Phase.MEMBER:
                    yield from self._lose(worker, reason)
        self._awaited.clear()
        self._awaited_hosts.clear()

    def _lose_hosts(self, hosts: Iterable[int], reason: str) -> Iterator[Action]:
        for host in sorted(hosts):
            self._gone.add(host)
            yield Publish(HostLost(host, reason))
            yield from self._lose_workers(host, reason)

    def _advance(self, now: float) -> Iterator[Action]:
        self._awaited &= self.membership.workers.keys()
        if not self._awaited:
            yield from super()._advance(now)


__all__ = ["Snapshot", "ResumableCoordinator"]
