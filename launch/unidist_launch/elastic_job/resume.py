"""Takes the place of a launcher that has died: the state that it left, and reports of agents that come back."""

from __future__ import annotations

import time

from unidist.control.elastic.resumable_coordinator import Snapshot
from unidist.control.messages import HostFacts
from unidist_launch.elastic_job.ends import WorkerEnds
from unidist_launch.elastic_job.hosts import ElasticHost
from unidist_launch.elastic_job.parts import ElasticParts
from unidist_launch.elastic_job.state_dir import damaged
from unidist_launch.elastic_job.workers import StartedWorker

_END_SEC = 5.0


class Resumption:
    """Keeps the launcher's part of a job's state, and takes it over. Does nothing in a job without a state.

    Args:
        parts: of the job.
        ends: deals with workers that have ended meanwhile.

    Attributes:
        has_taken_over: another launcher has begun this job.

    Raises:
        ConfigurationError: the state is damaged.
    """

    def __init__(self, parts: ElasticParts, ends: WorkerEnds) -> None:
        self._parts = parts
        self._ends = ends
        self._is_changed = True
        self._count = 0
        self._first_new = 0
        self.has_taken_over = parts.kept is not None and parts.kept.found is not None
        if parts.kept is not None:
            parts.log.listen(lambda event, fields: self._note_change())
            if parts.kept.found is not None:
                try:
                    self._take_over(parts.kept.found["launcher"])
                except (KeyError, TypeError, ValueError, AttributeError):
                    assert parts.limits.state_dir is not None
                    raise damaged(parts.limits.state_dir) from None

    def keep(self) -> None:
        """Keep what has changed; after things were started, and before anything else happens."""
        parts, kept = self._parts, self._parts.kept
        if kept is None:
            return
        if kept.failure:
            parts.output.message(f"unidist: warning: {kept.failure}")
            kept.failure = ""
        if self._is_changed or self._count != parts.workers.count:
            self._is_changed, self._count = False, parts.workers.count
            state = kept_parts(parts)
            parts.server.call(lambda: kept.keep_launcher(state))

    def welcome(self, host: ElasticHost, facts: HostFacts) -> None:
        """An agent has come back: compare its workers with those that are known here. How some ended, it tells next."""
        parts = self._parts
        told = {number: (seat, pid) for number, seat, pid, _ in facts.workers}
        ended = {number for number, _, _, has_ended in facts.workers if has_ended}
        for number, (seat, pid) in sorted(told.items()):
            worker = parts.workers.get(number)
            if worker is None and number >= self._first_new:  # started at the last moment
                parts.workers.take_over([StartedWorker(number, seat, host.index)], number + 1)
                parts.slots.take(host.name, number, instead_of=ended)
                parts.label(seat, host.name)
                worker = parts.workers.get(number)
            if worker is None:
                continue  # its end was dealt with
            worker.pid = pid
            if number not in ended and not worker.has_left and number not in parts.coordinator.membership.workers:
                worker.kill_at = time.monotonic() + _END_SEC  # it was given up, and is to end
        for worker in parts.workers.of_host(host.index):
            if worker.number not in told:
                self._ends.end_worker(worker.number, 1, host_lost="the launcher died before it was started")

    def _note_change(self) -> None:
        self._is_changed = True

    def _take_over(self, kept: Snapshot | None) -> None:
        parts, membership = self._parts, self._parts.coordinator.membership
        parts.num_agents = parts.coordinator.num_expected
        parts.generation = parts.coordinator.generation if membership.has_begun else -1
        parts.is_finishing = membership.is_finishing
        numbers = [number + 1 for number in membership.workers]
        if kept is None:
            parts.workers.take_over((), max(numbers, default=0))
            return
        now = time.monotonic()
        workers = [
            StartedWorker(
                int(each["number"]),
                int(each["seat"]),
                int(each["host"]),
                int(each["pid"]),
                is_ready=bool(each["has_joined"]),
                joined=now if each["has_joined"] else None,
                is_leaving=bool(each["is_leaving"]),
                has_left=bool(each["has_left"]),
            )
            for each in kept["workers"]
        ]
        self._first_new = int(kept["count"])
        parts.workers.take_over(workers, max([self._first_new, *numbers]))
        parts.hosts.restore(kept["hosts"])
        parts.slots.restore(kept["slots"])
        parts.patience.restore(kept["patience"])
        for worker in workers:
            host = parts.hosts.by_index(worker.host)
            if host is not None:
                parts.label(worker.seat, host.name)


def kept_parts(parts: ElasticParts) -> Snapshot:
    """Return the launcher's part of the state; plain data."""
    return {
        "count": parts.workers.count,
        "workers": [
            {
                "number": worker.number,
                "seat": worker.seat,
                "host": worker.host,
                "pid": worker.pid,
                "has_joined": worker.joined is not None,
                "is_leaving": worker.is_leaving,
                "has_left": worker.has_left,
            }
            for worker in parts.workers
        ],
        "hosts": parts.hosts.snapshot(),
        "slots": parts.slots.snapshot(),
        "patience": parts.patience.snapshot(),
    }
