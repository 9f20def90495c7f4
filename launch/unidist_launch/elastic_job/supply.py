"""Starts what an elastic job is short of: agents on hosts, workers in free slots."""

from __future__ import annotations

import time

from unidist.control.messages import StartWorker
from unidist.errors import ConfigurationError
from unidist.topology import Topology
from unidist_launch.elastic_job.hosts import ElasticHost
from unidist_launch.elastic_job.parts import ElasticParts


class Supply:
    """Starts what is missing.

    Args:
        parts: of the job.
    """

    def __init__(self, parts: ElasticParts) -> None:
        self._parts = parts
        self._error = ""
        self._withdrawn: set[int] = set()

    def discover(self) -> None:
        """Ask which hosts there are, where a script says so."""
        parts = self._parts
        if parts.discovery is None:
            return
        try:
            hosts = parts.discovery.poll()
        except ConfigurationError as exc:
            if str(exc) != self._error:
                self._error = str(exc)
                parts.output.message(f"unidist: host discovery: {exc}; the hosts stay as they are")
            return
        if hosts is None:
            return
        self._error = ""
        before = {name: parts.slots.num_on(name) for name in parts.slots.hosts}
        self._withdrawn = set(parts.slots.offer(hosts))
        after = {host.name: host.slots for host in hosts}
        if before != after:
            parts.log.publish("hosts", hosts=after)
            for host in parts.hosts.present():
                self._limit(host)
        if before != after and self._withdrawn and not self._has_successor():
            parts.output.message("unidist: none of these hosts has a rank yet; the others go on until one has come")

    def vacate(self) -> None:
        """Have workers leave whose slots are withdrawn; those with the only copy of the state await a successor.

        Whoever takes a host away for good ends what runs there: a list without any of the hosts may be a mistake.
        """
        parts = self._parts
        has_successor = parts.generation < 0 or not self._withdrawn or self._has_successor()
        for number in self._withdrawn:
            worker = parts.workers.get(number)
            if worker is not None and (has_successor or worker.joined is None):
                parts.retire(number)

    def _has_successor(self) -> bool:
        return any(
            worker.is_ready and not worker.is_leaving and worker.number not in self._withdrawn
            for worker in self._parts.workers
        )

    def fill(self) -> None:
        """Start agents and workers where there is room.

        Raises:
            ConfigurationError: the command that leads to a host cannot be started.
        """
        parts = self._parts
        if parts.ending.has_begun or parts.is_finishing:
            return
        now = time.monotonic()
        has_begun = parts.generation >= 0
        first = max(parts.job.num_proc, parts.limits.min_num)
        limit = parts.limits.max_num + parts.slots.num_spare if has_begun else first
        free = parts.slots.free(now, limit)
        others = {each.index for each in parts.hosts.present()} if free else set()
        proven: dict[int, bool] = {}
        for slot in free:
            host = parts.hosts.by_name.get(slot.host)
            if host is not None and host.is_up:
                if host.index not in proven:
                    proven[host.index] = parts.links.is_proven(host.index, others)
                if proven[host.index]:
                    slot.worker = self._start_worker(host)
            elif host is None or not host.is_terminating:
                try:
                    parts.hosts.want(slot.host, now)
                except OSError as exc:
                    raise ConfigurationError(f"host {slot.host}: its agent cannot be started: {exc}") from exc

    def _limit(self, host: ElasticHost) -> None:
        """Tell the coordinator how many members the host has room for: it may have spare workers beside them."""
        parts, index, room = self._parts, host.index, self._parts.slots.num_on(host.name)
        if parts.limits.num_spares:
            parts.server.call(lambda: parts.coordinator.limit_host(index, room))

    def _start_worker(self, host: ElasticHost) -> int:
        parts, index = self._parts, host.index
        worker = parts.workers.add(index)
        number, seat = worker.number, worker.seat
        parts.label(seat, host.name)
        self._limit(host)
        parts.server.call(lambda: parts.coordinator.expect_worker(number, index))
        assert host.facts is not None
        is_first = parts.generation < 0 and seat < parts.job.num_proc
        # For those who look at the variables before init(); what holds is what the coordinator says.
        is_known = is_first and parts.is_here
        place = Topology(seat, parts.job.num_proc, seat, parts.job.num_proc) if is_known else Topology()
        parts.tell(
            StartWorker(
                worker=number,
                seat=seat,
                slots=parts.slots.num_on(host.name),
                place=place,
                address=parts.hosts.address_of(host),
                master=parts.hosts.address_of(host),
                values=parts.job.has_side_processes,
            ),
            index,
        )
        return number
