"""What an elastic job should have, and what is started for it: agents on hosts, workers in free slots."""

from __future__ import annotations

import time
from dataclasses import astuple

from unidist.errors import ConfigurationError
from unidist.topology import Topology
from unidist_launch.elastic_hosts import ElasticHost
from unidist_launch.elastic_parts import ElasticParts


class Supply:
    """Starts what is missing.

    Args:
        parts: of the job.
    """

    def __init__(self, parts: ElasticParts) -> None:
        self._parts = parts
        self._error = ""

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
        leaving = parts.slots.offer(hosts)
        after = {host.name: host.slots for host in hosts}
        if before != after:
            parts.log.publish("hosts", hosts=after)
        for number in leaving:
            parts.retire(number)

    def fill(self) -> None:
        """Start agents and workers where there is room.

        Raises:
            ConfigurationError: the command that leads to a host cannot be started.
        """
        parts = self._parts
        if parts.ending.has_begun or parts.is_finishing:
            return
        now = time.monotonic()
        limit = parts.limits.max_num if parts.generation >= 0 else max(parts.job.num_proc, parts.limits.min_num)
        for slot in parts.slots.free(now, limit):
            host = parts.hosts.by_name.get(slot.host)
            if host is not None and host.is_up:
                slot.worker = self._start_worker(host)
            elif host is None or not host.is_terminating:
                try:
                    parts.hosts.want(slot.host, now)
                except OSError as exc:
                    raise ConfigurationError(f"host {slot.host}: its agent cannot be started: {exc}") from exc

    def _start_worker(self, host: ElasticHost) -> int:
        parts, index = self._parts, host.index
        worker = parts.workers.add(index)
        number, seat = worker.number, worker.seat
        parts.host_names[seat] = host.name
        parts.server.call(lambda: parts.coordinator.expect_worker(number, index))
        assert host.facts is not None
        is_first = parts.generation < 0 and seat < parts.job.num_proc
        # For those who look at the variables before init(); what holds is what the coordinator says.
        is_known = is_first and parts.is_here
        place = Topology(seat, parts.job.num_proc, seat, parts.job.num_proc) if is_known else Topology()
        parts.tell(
            {
                "type": "start_worker",
                "worker": number,
                "seat": seat,
                "slots": parts.slots.num_on(host.name),
                "place": list(astuple(place)),
                "address": parts.hosts.address_of(host),
                "master": parts.hosts.address_of(host),
            },
            index,
        )
        return number
