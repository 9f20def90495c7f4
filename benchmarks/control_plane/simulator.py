"""The program of a simulator: hosts of a job, with their workers, until its standard input ends.

    python -m benchmarks.control_plane.simulator

Reads `requests`, and writes answers, each a line of JSON.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import threading
import time
from typing import Any

from benchmarks.control_plane.hosts import ADDRESS, SimulatedHost, SimulatedRanks
from benchmarks.control_plane.requests import EndWorker, Exchange, StartHost, Stats
from benchmarks.control_plane.workers import Record
from unidist.control.client import connect
from unidist.control.codec import decode
from unidist.errors import UnidistError
from unidist_launch.agent.order import AgentOrder

_CONNECT_SEC = 120.0
_SWITCH_SEC = 0.5
"""Threads give each other way when they wait; hundreds that ask for it all the time would do little else."""


def main() -> None:
    """Do what standard input says."""
    threading.stack_size(256 << 10)
    sys.setswitchinterval(_SWITCH_SEC)
    gc.freeze()
    record = Record()
    hosts: list[SimulatedHost | SimulatedRanks] = []
    for line in sys.stdin:
        match decode(line.encode()):
            case StartHost(order):
                arguments = (AgentOrder.from_line(order.encode()), record, hosts)
                threading.Thread(target=_run_host, args=arguments, daemon=True).start()
            case EndWorker(worker):
                any(host.end_worker(worker) for host in list(hosts))
            case Exchange():
                for host in list(hosts):
                    assert isinstance(host, SimulatedRanks)
                    host.exchange()
            case Stats():
                print(json.dumps({**record.as_fields(), **usage()}), flush=True)


def _run_host(order: AgentOrder, record: Record, hosts: list[SimulatedHost | SimulatedRanks]) -> None:
    kind = SimulatedHost if order.is_elastic else SimulatedRanks
    try:
        connection = connect((ADDRESS, order.port), bytes.fromhex(order.secret), timeout=_CONNECT_SEC)
        with kind(order, connection, record) as host:
            hosts.append(host)
            host.introduce()
            host.run()
            hosts.remove(host)
    except UnidistError as exc:
        record.errors.append(f"agent {order.host}: {exc}")


def usage() -> dict[str, Any]:
    """Return what this process has used: processor time in seconds, resident memory in bytes."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    return {"cpu": time.process_time(), "resident": resident}


if __name__ == "__main__":
    main()
